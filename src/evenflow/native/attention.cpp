// CPU attention kernel over contiguous KV.
//
// The query heads that share a KV head are rows like any other: row r of a span is position r / group, head r % group.
// Softmax is computed online over tiles of keys, in base 2.
//
// Many rows ("panels"): each row is a lane. Queries are transposed once into [head_dim, rows]. Scores, weights and
// results are [keys or head_dim, rows]; keys and values are read in place, one number for all lanes, and no sum or
// maximum crosses lanes.
// One position with few heads ("few rows"): lanes are the head_dim, since rows would fill too few of them.
//
// In fixed order, panels do all of it: a lane's sums do not depend on the other lanes, tiles begin at the same keys for
// all rows, and a key that a row may not see adds exactly nothing. The keys of a row are not split between threads.

#include "attention.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kMaxHeadDim = 256;
constexpr int kPanelVectors = 3;
constexpr int kPanelRows = kPanelVectors * kLanes;
constexpr int kPanelHeight = kRegisters == 32 ? 8 : 4;  // times kPanelVectors sums are kept in registers
constexpr int kBlockRows = 96;                          // rows that read the same tile of keys while it is in a cache
constexpr int kBlockPanels = kBlockRows / kPanelRows;
constexpr int kPanelKeys = 64;
constexpr int kFewRows = 4;
constexpr int kFewKeys = 64;
constexpr int kPartKeys = 512;     // a span of one block is split into parts of this many keys, for several threads
constexpr float kLowest = -1e30f;  // finite, so that differences of two of them are numbers
constexpr float kLog2E = 1.44269504f;
constexpr int64_t kWorthThreads = 1 << 17;  // multiplications; below, waking threads costs more than they save

// The number in every lane. Not number + 0, which the compiler could not drop, since -0 + 0 is 0.
inline Floats splat(float number) { return number - Floats{}; }

inline Floats highest(Floats a, Floats b) { return a > b ? a : b; }

// 2^x with a relative error of 2e-7; for x below -126, 2^-126, which is negligible beside a 1.
inline Floats power_of_2(Floats x) {
    constexpr float kWholeNumbers = 12582912.0f;  // 1.5 * 2^23: a float of this size has no fraction
    x = highest(x, splat(-126.0f));
    const Floats shifted = x + kWholeNumbers;
    const Floats fraction = x - (shifted - kWholeNumbers);
    Floats power = fraction * 1.326472733e-3f + 9.671512824e-3f;
    power = power * fraction + 5.550733745e-2f;
    power = power * fraction + 2.402224208e-1f;
    power = power * fraction + 6.931469776e-1f;
    power = power * fraction + 1.0f;
    return (Floats)((Ints)power + ((Ints)shifted << 23));
}

// Lane i: with `bit` of i clear, a[i] + a[i ^ bit]; with it set, b[i] + b[i ^ bit].
template <int bit, int... lane>
inline Floats add_halves(Floats a, Floats b, std::integer_sequence<int, lane...>) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, (lane & bit ? lane + kLanes : lane)...) +
           __builtin_shufflevector(a, b, (lane & bit ? (lane ^ bit) + kLanes : lane ^ bit)...);
#else
    return __builtin_shuffle(a, b, Ints{(lane & bit ? lane + kLanes : lane)...}) +
           __builtin_shuffle(a, b, Ints{(lane & bit ? (lane ^ bit) + kLanes : lane ^ bit)...});
#endif
}

// Lane i is the sum over all lanes of vectors[i].
template <int count = kLanes>
inline Floats lane_sums(Floats* vectors) {
    constexpr int half = count / 2;
    for (int i = 0; i < half; ++i) {
        vectors[i] = add_halves<half>(vectors[i], vectors[i + half], std::make_integer_sequence<int, kLanes>());
    }
    if constexpr (half > 1) {
        return lane_sums<half>(vectors);
    } else {
        return vectors[0];
    }
}

// Keys and values come from main memory: each is fetched while the other is used.
inline void prefetch(const float* numbers, int64_t count) {
    constexpr int64_t kCacheLine = 16;
    for (int64_t i = 0; i < count; i += kCacheLine) __builtin_prefetch(numbers + i);
}

// One KV head of one span: its queries, keys and values.
struct Head {
    const float* queries;
    int64_t query_stride;  // between positions; the heads of a group lie side by side
    const float* keys;
    const float* values;
    int64_t token_stride;
    int64_t start, group, head_dim;
    int64_t window;
    float scale;  // with the factor that turns base e into base 2

    const float* query(int64_t row) const { return queries + row / group * query_stride + row % group * head_dim; }
    int64_t position(int64_t row) const { return start + row / group; }
};

// Where the results of rows go: to the step's rows, or, for a part of the keys, to the parts that are joined later.
struct Results {
    float* rows;
    int64_t position_stride, group, head_dim;
    float* tops;     // null: rows are final. Else rows are sums of weighted values, with their highest score
    float* weights;  // and the sum of their weights

    float* row(int64_t number) const { return rows + number / group * position_stride + number % group * head_dim; }

    // The factor for the row's sums.
    float finish(int64_t number, float top, float weight) const {
        if (tops == nullptr) return 1 / weight;
        tops[number] = top;
        weights[number] = weight;
        return 1;
    }
};

// Rows [first_row, last_row) of a head against keys [first_key, last_key).
struct Block {
    int64_t first_row, last_row, first_key, last_key;
};

struct Panel {
    alignas(64) float queries[kMaxHeadDim * kPanelRows];
    alignas(64) float attended[kMaxHeadDim * kPanelRows];
    alignas(64) float tops[kPanelRows];
    alignas(64) float weights[kPanelRows];
    alignas(64) int32_t positions[kPanelRows];
    int64_t first_row, num_rows;
};

struct Workspace {
    Panel panels[kBlockPanels];
    alignas(64) float tile[kPanelKeys * kPanelRows];
    alignas(64) float few_tile[kFewRows * kFewKeys];
    alignas(64) float few_attended[kFewRows * kMaxHeadDim];
};

// ---- Many rows: a lane for each ----

// tile[key, row] = key . query; what a row may not see is kLowest. `tops` grow to the highest scores.
template <int vectors, bool masked>
void score_keys(const Panel& panel, const Head& head, int64_t first_key, int64_t num_keys, float* tile, Floats* tops) {
    for (int64_t key = 0; key < num_keys; key += kPanelHeight) {
        int64_t numbers[kPanelHeight];
        const float* keys[kPanelHeight];
        for (int i = 0; i < kPanelHeight; ++i) {
            // Past the end the last key is repeated: those scores are unused and do not change the highest.
            numbers[i] = first_key + std::min(key + i, num_keys - 1);
            keys[i] = head.keys + numbers[i] * head.token_stride;
            prefetch(keys[i] + kPanelHeight * head.token_stride, head.head_dim);
            prefetch(head.values + numbers[i] * head.token_stride, head.head_dim);
        }
        Floats scores[kPanelHeight][vectors] = {};
        const float* query = panel.queries;
        for (int64_t dim = 0; dim < head.head_dim; ++dim, query += kPanelRows) {
            Floats queries[vectors];
            for (int v = 0; v < vectors; ++v) queries[v] = load<Floats>(query + v * kLanes);
            for (int i = 0; i < kPanelHeight; ++i) {
                const Floats number = splat(keys[i][dim]);
                for (int v = 0; v < vectors; ++v) scores[i][v] += queries[v] * number;
            }
        }
        for (int i = 0; i < kPanelHeight; ++i) {
            for (int v = 0; v < vectors; ++v) {
                if constexpr (masked) {
                    const Ints distance = load<Ints>(panel.positions + v * kLanes) - (int32_t)numbers[i];
                    const Ints hidden = (distance < 0) | (distance >= (int32_t)head.window);
                    scores[i][v] = hidden ? splat(kLowest) : scores[i][v];
                }
                tops[v] = highest(tops[v], scores[i][v]);
                store(tile + (key + i) * kPanelRows + v * kLanes, scores[i][v]);
            }
        }
    }
}

// attended[dim, row] = attended[dim, row] * kept[row] + sum over keys of value[key, dim] * tile[key, row]
template <int vectors>
void add_values(Panel& panel, const Head& head, int64_t first_key, int64_t num_keys, const float* tile,
                const Floats* kept) {
    for (int64_t dim = 0; dim < head.head_dim; dim += kPanelHeight) {
        float* attended = panel.attended + dim * kPanelRows;
        Floats sums[kPanelHeight][vectors];
        for (int i = 0; i < kPanelHeight; ++i) {
            for (int v = 0; v < vectors; ++v) {
                sums[i][v] = load<Floats>(attended + i * kPanelRows + v * kLanes) * kept[v];
            }
        }
        const float* values = head.values + first_key * head.token_stride + dim;
        for (int64_t key = 0; key < num_keys; ++key, values += head.token_stride) {
            Floats weights[vectors];
            for (int v = 0; v < vectors; ++v) weights[v] = load<Floats>(tile + key * kPanelRows + v * kLanes);
            for (int i = 0; i < kPanelHeight; ++i) {
                const Floats number = splat(values[i]);
                for (int v = 0; v < vectors; ++v) sums[i][v] += weights[v] * number;
            }
        }
        for (int i = 0; i < kPanelHeight; ++i) {
            for (int v = 0; v < vectors; ++v) store(attended + i * kPanelRows + v * kLanes, sums[i][v]);
        }
    }
}

template <int vectors>
void attend_tile(Panel& panel, const Head& head, int64_t first_key, int64_t num_keys, float* tile) {
    Floats tops[vectors], kept[vectors], weights[vectors];
    for (int v = 0; v < vectors; ++v) tops[v] = load<Floats>(panel.tops + v * kLanes);
    const bool all_seen = first_key + num_keys - 1 <= panel.positions[0] &&
                          first_key > panel.positions[panel.num_rows - 1] - head.window;
    const auto score = all_seen ? score_keys<vectors, false> : score_keys<vectors, true>;
    score(panel, head, first_key, num_keys, tile, tops);
    for (int v = 0; v < vectors; ++v) {
        kept[v] = power_of_2(load<Floats>(panel.tops + v * kLanes) - tops[v]);
        weights[v] = load<Floats>(panel.weights + v * kLanes) * kept[v];
        store(panel.tops + v * kLanes, tops[v]);
    }
    for (int64_t key = 0; key < num_keys; ++key) {
        for (int v = 0; v < vectors; ++v) {
            float* scores = tile + key * kPanelRows + v * kLanes;
            const Floats score = load<Floats>(scores);
            const Floats weight = score > kLowest ? power_of_2(score - tops[v]) : Floats{};
            weights[v] += weight;
            store(scores, weight);
        }
    }
    for (int v = 0; v < vectors; ++v) store(panel.weights + v * kLanes, weights[v]);
    add_values<vectors>(panel, head, first_key, num_keys, tile, kept);
}

void start_panel(Panel& panel, const Head& head) {
    const float* queries[kPanelRows];
    for (int64_t lane = 0; lane < kPanelRows; ++lane) {
        const int64_t row = panel.first_row + std::min(lane, panel.num_rows - 1);  // spare lanes repeat the last
        queries[lane] = head.query(row);
        panel.positions[lane] = (int32_t)head.position(row);
        panel.tops[lane] = kLowest;
        panel.weights[lane] = 0;
    }
    for (int64_t dim = 0; dim < head.head_dim; ++dim) {
        for (int lane = 0; lane < kPanelRows; ++lane) {
            panel.queries[dim * kPanelRows + lane] = queries[lane][dim] * head.scale;
            panel.attended[dim * kPanelRows + lane] = 0;
        }
    }
}

void finish_panel(const Panel& panel, const Results& results) {
    for (int64_t lane = 0; lane < panel.num_rows; ++lane) {
        const int64_t row = panel.first_row + lane;
        const float scale = results.finish(row, panel.tops[lane], panel.weights[lane]);
        float* to = results.row(row);
        for (int64_t dim = 0; dim < results.head_dim; ++dim) to[dim] = panel.attended[dim * kPanelRows + lane] * scale;
    }
}

void attend_many(const Head& head, const Block& block, const Results& results, Workspace& space) {
    const int64_t num_panels = (block.last_row - block.first_row + kPanelRows - 1) / kPanelRows;
    for (int64_t number = 0; number < num_panels; ++number) {
        Panel& panel = space.panels[number];
        panel.first_row = block.first_row + number * kPanelRows;
        panel.num_rows = std::min<int64_t>(kPanelRows, block.last_row - panel.first_row);
        start_panel(panel, head);
    }
    for (int64_t key = block.first_key; key < block.last_key; key += kPanelKeys) {
        for (int64_t number = 0; number < num_panels; ++number) {
            Panel& panel = space.panels[number];
            const int64_t first_position = panel.positions[0], last_position = panel.positions[panel.num_rows - 1];
            const int64_t last_key = std::min({key + kPanelKeys, block.last_key, last_position + 1});
            if (last_key <= key || last_key <= first_position - head.window + 1) continue;
            const auto attend = panel.num_rows > 2 * kLanes ? attend_tile<3>
                                : panel.num_rows > kLanes   ? attend_tile<2>
                                                            : attend_tile<1>;
            attend(panel, head, key, last_key - key, space.tile);
        }
    }
    for (int64_t number = 0; number < num_panels; ++number) finish_panel(space.panels[number], results);
}

// ---- Few rows of one position: lanes are the head's dimensions ----

// tile[row, key] = query . key * scale, for whole vectors of keys.
template <int rows>
void score_keys_few(const Head& head, const float* queries, int64_t first_key, int64_t num_keys, float* tile) {
    constexpr int kKeys = kRegisters == 32 ? 4 : 2;
    for (int64_t key = 0; key < num_keys; key += kLanes) {
        Floats products[rows][kLanes];
        for (int first = 0; first < kLanes; first += kKeys) {
            const float* keys[kKeys];
            for (int i = 0; i < kKeys; ++i) {
                const int64_t offset = (first_key + std::min(key + first + i, num_keys - 1)) * head.token_stride;
                keys[i] = head.keys + offset;
                prefetch(head.values + offset, head.head_dim);
            }
            Floats sums[rows][kKeys] = {};
            for (int64_t dim = 0; dim < head.head_dim; dim += kLanes) {
                Floats numbers[kKeys];
                for (int i = 0; i < kKeys; ++i) numbers[i] = load<Floats>(keys[i] + dim);
                for (int row = 0; row < rows; ++row) {
                    const Floats query = load<Floats>(queries + row * head.head_dim + dim);
                    for (int i = 0; i < kKeys; ++i) sums[row][i] += query * numbers[i];
                }
            }
            for (int row = 0; row < rows; ++row) {
                for (int i = 0; i < kKeys; ++i) products[row][first + i] = sums[row][i];
            }
        }
        for (int row = 0; row < rows; ++row) store(tile + row * kFewKeys + key, lane_sums(products[row]) * head.scale);
    }
}

// attended[row, dims] = attended[row, dims] * kept[row] + sum over keys of tile[row, key] * value[key, dims]
template <int rows, int vectors>
void add_values_few(const Head& head, int64_t dim, int64_t first_key, int64_t num_keys, const float* tile,
                    const float* kept, float* attended) {
    Floats sums[rows][vectors];
    for (int row = 0; row < rows; ++row) {
        for (int v = 0; v < vectors; ++v) {
            sums[row][v] = load<Floats>(attended + row * kMaxHeadDim + dim + v * kLanes) * kept[row];
        }
    }
    const float* value = head.values + first_key * head.token_stride + dim;
    const float* next_key = head.keys + (first_key + kFewKeys) * head.token_stride + dim;
    for (int64_t key = 0; key < num_keys; ++key, value += head.token_stride, next_key += head.token_stride) {
        prefetch(next_key, vectors * kLanes);
        for (int v = 0; v < vectors; ++v) {
            const Floats values = load<Floats>(value + v * kLanes);
            for (int row = 0; row < rows; ++row) sums[row][v] += values * tile[row * kFewKeys + key];
        }
    }
    for (int row = 0; row < rows; ++row) {
        for (int v = 0; v < vectors; ++v) store(attended + row * kMaxHeadDim + dim + v * kLanes, sums[row][v]);
    }
}

// The row's scores become weights; its top and the sum of its weights move on. Returns what earlier sums keep.
float weigh_few(float* scores, int64_t num_keys, float& top, float& weight) {
    const int64_t num_padded = (num_keys + kLanes - 1) / kLanes * kLanes;
    std::fill(scores + num_keys, scores + num_padded, kLowest);
    Floats tops = splat(top), weights = {};
    for (int64_t key = 0; key < num_padded; key += kLanes) tops = highest(tops, load<Floats>(scores + key));
    float new_top = tops[0];
    for (int lane = 1; lane < kLanes; ++lane) new_top = std::max(new_top, tops[lane]);
    for (int64_t key = 0; key < num_padded; key += kLanes) {
        const Floats part = power_of_2(load<Floats>(scores + key) - new_top);
        weights += part;
        store(scores + key, part);
    }
    const float kept = power_of_2(splat(top - new_top))[0];
    top = new_top;
    weight = weight * kept + sum(weights);
    return kept;
}

template <int rows>
void attend_few(const Head& head, int64_t first_row, const Block& block, const Results& results, Workspace& space) {
    constexpr int kWide = kRegisters == 32 ? 4 : 2;
    const float* queries = head.query(first_row);
    float tops[rows], weights[rows] = {}, kept[rows];
    std::fill_n(tops, rows, kLowest);
    std::fill_n(space.few_attended, rows * kMaxHeadDim, 0.0f);
    for (int64_t key = block.first_key; key < block.last_key; key += kFewKeys) {
        const int64_t num_keys = std::min<int64_t>(kFewKeys, block.last_key - key);
        score_keys_few<rows>(head, queries, key, num_keys, space.few_tile);
        for (int row = 0; row < rows; ++row) {
            kept[row] = weigh_few(space.few_tile + row * kFewKeys, num_keys, tops[row], weights[row]);
        }
        int64_t dim = 0;
        for (; dim + kWide * kLanes <= head.head_dim; dim += kWide * kLanes) {
            add_values_few<rows, kWide>(head, dim, key, num_keys, space.few_tile, kept, space.few_attended);
        }
        for (; dim < head.head_dim; dim += kLanes) {
            add_values_few<rows, 1>(head, dim, key, num_keys, space.few_tile, kept, space.few_attended);
        }
    }
    for (int row = 0; row < rows; ++row) {
        const float scale = results.finish(first_row + row, tops[row], weights[row]);
        float* to = results.row(first_row + row);
        for (int64_t dim = 0; dim < head.head_dim; ++dim) to[dim] = space.few_attended[row * kMaxHeadDim + dim] * scale;
    }
}

void attend(const Head& head, const Block& block, const Results& results, bool fixed_order, Workspace& space) {
    const bool is_one_position = block.last_row - block.first_row == head.group && block.first_row % head.group == 0;
    if (fixed_order || !is_one_position || 2 * head.group > kLanes) return attend_many(head, block, results, space);
    for (int64_t row = block.first_row; row < block.last_row; row += kFewRows) {
        switch (block.last_row - row) {
            case 1: attend_few<1>(head, row, block, results, space); break;
            case 2: attend_few<2>(head, row, block, results, space); break;
            case 3: attend_few<3>(head, row, block, results, space); break;
            default: attend_few<kFewRows>(head, row, block, results, space);
        }
    }
}

// ---- A step's work, spread over the threads ----

// A block of a KV head of a span, and the number of its partial result.
struct Work {
    int64_t span, head;
    Block block;
    int64_t part;  // -1: the result is final
};

// The partial results [first_part, last_part) of all rows of a KV head of a span.
struct Join {
    int64_t span, head, first_part, last_part;
};

struct Step {
    const Span* spans;
    int64_t layer;
    const AttentionShape& shape;
    const float* packed;
    float* attended;
    int64_t group, row_size, attended_size;  // sizes of a packed and of an attended row
    std::vector<int64_t> first_rows;         // of each span among all rows
    std::vector<Work> works;
    std::vector<Join> joins;
    int64_t num_parts = 0, max_part_rows = 0;
    int64_t num_products = 0;
    std::vector<float> parts;

    Step(const Span* spans, int64_t num_spans, int64_t layer, const AttentionShape& shape, const float* packed,
         float* attended)
        : spans(spans), layer(layer), shape(shape), packed(packed), attended(attended) {
        group = shape.num_heads / shape.num_kv_heads;
        attended_size = shape.num_heads * shape.head_dim;
        row_size = attended_size + 2 * shape.num_kv_heads * shape.head_dim;
        int64_t first_row = 0;
        for (int64_t span = 0; span < num_spans; ++span) {
            first_rows.push_back(first_row);
            first_row += spans[span].length;
            for (int64_t head = 0; head < shape.num_kv_heads; ++head) add_works(span, head);
        }
        parts.resize(num_parts * part_size());
    }

    int64_t window() const { return shape.window > 0 ? shape.window : INT32_MAX; }
    int64_t part_size() const { return max_part_rows * (shape.head_dim + 2); }

    void add_works(int64_t span, int64_t head) {
        const int64_t start = spans[span].start, num_rows = spans[span].length * group;
        // The last rows see the most keys: they come first, so that all threads end at about the same time.
        for (int64_t first_row = (num_rows - 1) / kBlockRows * kBlockRows; first_row >= 0; first_row -= kBlockRows) {
            const int64_t last_row = std::min(first_row + kBlockRows, num_rows);
            int64_t first_key = std::max<int64_t>(0, start + first_row / group + 1 - window());
            if (shape.fixed_order) first_key -= first_key % kPanelKeys;
            const int64_t last_key = start + (last_row - 1) / group + 1;
            num_products += (last_row - first_row) * (last_key - first_key) * shape.head_dim;
            if (shape.fixed_order || num_rows > kBlockRows || last_key - first_key <= kPartKeys) {
                works.push_back({span, head, {first_row, last_row, first_key, last_key}, -1});
                continue;
            }
            const int64_t first_part = num_parts;
            max_part_rows = std::max(max_part_rows, num_rows);
            for (int64_t key = first_key; key < last_key; key += kPartKeys) {
                const Block block{first_row, last_row, key, std::min(key + kPartKeys, last_key)};
                works.push_back({span, head, block, num_parts++});
            }
            joins.push_back({span, head, first_part, num_parts});
        }
    }

    float* memory(int64_t span, int64_t head) const {
        return spans[span].kv + layer * spans[span].layer_stride + head * spans[span].head_stride;
    }

    Results part(int64_t number) {
        float* rows = parts.data() + number * part_size();
        float* tops = rows + max_part_rows * shape.head_dim;
        return {rows, group * shape.head_dim, group, shape.head_dim, tops, tops + max_part_rows};
    }

    Results whole(int64_t span, int64_t head) const {
        float* rows = attended + first_rows[span] * attended_size + head * group * shape.head_dim;
        return {rows, attended_size, group, shape.head_dim, nullptr, nullptr};
    }

    // Keys and values of one row into its sequence's memory.
    void write(int64_t row) const {
        const int64_t span = std::upper_bound(first_rows.begin(), first_rows.end(), row) - first_rows.begin() - 1;
        const int64_t position = spans[span].start + row - first_rows[span];
        const float* from = packed + row * row_size + attended_size;
        for (int64_t values = 0; values < 2; ++values) {
            for (int64_t head = 0; head < shape.num_kv_heads; ++head, from += shape.head_dim) {
                std::copy_n(from, shape.head_dim,
                            memory(span, head) + values * spans[span].values_stride + position * spans[span].token_stride);
            }
        }
    }

    void run(const Work& work, Workspace& space) {
        const Span& span = spans[work.span];
        const float* keys = memory(work.span, work.head);
        const Head head{packed + first_rows[work.span] * row_size + work.head * group * shape.head_dim,
                        row_size,
                        keys,
                        keys + span.values_stride,
                        span.token_stride,
                        span.start,
                        group,
                        shape.head_dim,
                        window(),
                        shape.scale * kLog2E};
        const Results results = work.part < 0 ? whole(work.span, work.head) : part(work.part);
        attend(head, work.block, results, shape.fixed_order, space);
    }

    void join(const Join& join) {
        const Results results = whole(join.span, join.head);
        for (int64_t row = 0; row < spans[join.span].length * group; ++row) {
            float top = kLowest, weight = 0;
            float* to = results.row(row);
            std::fill_n(to, shape.head_dim, 0.0f);
            for (int64_t number = join.first_part; number < join.last_part; ++number) {
                top = std::max(top, part(number).tops[row]);
            }
            for (int64_t number = join.first_part; number < join.last_part; ++number) {
                const Results found = part(number);
                const float share = std::exp2(found.tops[row] - top);
                weight += found.weights[row] * share;
                for (int64_t dim = 0; dim < shape.head_dim; ++dim) to[dim] += found.row(row)[dim] * share;
            }
            for (int64_t dim = 0; dim < shape.head_dim; ++dim) to[dim] /= weight;
        }
    }
};

}  // namespace

extern "C" void evenflow_attention(const Span* spans, int64_t num_spans, int64_t layer, const AttentionShape* shape,
                                   const float* packed, float* attended) {
    Step step(spans, num_spans, layer, *shape, packed, attended);
    const int64_t num_rows = step.first_rows.back() + spans[num_spans - 1].length;
    const int64_t num_works = step.works.size(), num_joins = step.joins.size();
#pragma omp parallel if (step.num_products > kWorthThreads)
    {
        Workspace space;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; ++row) step.write(row);
#pragma omp for schedule(dynamic)
        for (int64_t number = 0; number < num_works; ++number) step.run(step.works[number], space);
#pragma omp for schedule(dynamic)
        for (int64_t number = 0; number < num_joins; ++number) step.join(step.joins[number]);
    }
}
