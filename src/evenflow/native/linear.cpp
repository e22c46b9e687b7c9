// Products of a few rows with a matrix; see linear.h. Outputs are split into strips that stay in a cache for all blocks
// of rows, and a strip and a block into tiles whose sums fit into registers.

#include "linear.h"

#include <algorithm>
#include <vector>

#include <omp.h>

#include "vectors.h"

namespace {

constexpr int64_t kGroup = 32, kPanel = kOutputUnit;
constexpr int kMaxRows = 6;     // of a block
constexpr int64_t kStrip = 64;  // outputs that stay in a cache for all blocks of rows

// Rows as the kernels read them, and where the products go: element [row, output] at row * stride + output - first.
struct Block {
    const float* rows;
    const float* group_sums;
    float* outputs;
    int64_t output_stride;
    bool adds;

    void put(const Matrix& matrix, int row, int64_t column, int64_t output, float value) const {
        float& to = outputs[row * output_stride + column];
        if (matrix.bias) value += matrix.bias[output];
        to = adds ? to + value : value;
    }
};

// ---- float32: vectors along the inputs -----------------------------------------------------------------------------

template <int kRows>
struct FloatTile {
    static constexpr int kOutputs = kRegisters / 8;

    template <int kCount>
    static void run(const Matrix& matrix, int64_t first, int64_t column, const Block& block) {
        const int64_t inputs = matrix.inputs, whole = inputs / kLanes * kLanes;
        const float* weight = static_cast<const float*>(matrix.weight) + first * inputs;
        Floats sums[kRows][kCount] = {};
        for (int64_t i = 0; i < whole; i += kLanes) {
            Floats weights[kCount];
            for (int o = 0; o < kCount; o++) {
                weights[o] = load<Floats>(weight + o * inputs + i);
                // The next tile's: without it, six rows take 1.4x as long, one row 1.2x.
                __builtin_prefetch(weight + (o + kCount) * inputs + i);
            }
            for (int r = 0; r < kRows; r++) {
                const Floats x = load<Floats>(block.rows + r * inputs + i);
                for (int o = 0; o < kCount; o++) sums[r][o] += weights[o] * x;
            }
        }
        for (int r = 0; r < kRows; r++)
            for (int o = 0; o < kCount; o++) {
                float total = sum(sums[r][o]);
                for (int64_t i = whole; i < inputs; i++) total += weight[o * inputs + i] * block.rows[r * inputs + i];
                block.put(matrix, r, column + o, first + o, total);
            }
    }

    static void run(const Matrix& matrix, int64_t first, int64_t last, int64_t column, const Block& block) {
        for (; last - first >= kOutputs; first += kOutputs, column += kOutputs)
            run<kOutputs>(matrix, first, column, block);
        for (; first < last; first++, column++) run<1>(matrix, first, column, block);
    }
};

// ---- codes: vectors along the outputs ------------------------------------------------------------------------------

// A word holds the codes of 32 / kBits inputs. Masked, one of them is code * 2^shift as an integer; the rows were
// multiplied by 2^-shift, so that no weight needs shifting. The topmost would be read as negative and is shifted down.
template <int kBits>
constexpr int kPerWord = 32 / kBits;
template <int kBits>
constexpr int shift_of(int64_t input) {
    return kBits * std::min<int>(input % kPerWord<kBits>, kPerWord<kBits> - 2);
}

template <int kBits, int kRows>
struct CodeTile {
    static constexpr int kPanelVectors = kPanel / kLanes;
    static constexpr int kVectors = std::max(kRows <= 2 ? 4 : 2, kPanelVectors);
    static constexpr int kOutputs = kVectors * kLanes;

    template <int kCount>  // vectors
    static void run(const Matrix& matrix, int64_t first, int64_t last, int64_t column, const Block& block) {
        const int64_t inputs = matrix.inputs, groups = inputs / kGroup, words = inputs / kPerWord<kBits>;
        const int32_t* weight = static_cast<const int32_t*>(matrix.weight) + first * words;
        const float* scales = matrix.scales + first * groups;
        const float* zeros = matrix.zeros + first * groups;
        const auto lane = [](int v) { return v % kPanelVectors * kLanes; };
        Floats totals[kRows][kCount] = {};
        for (int64_t group = 0; group < groups; group++) {
            Floats sums[kRows][kCount] = {};
            for (int word = 0; word < kBits; word++) {
                const int64_t at = group * kBits + word;
                const float* x = block.rows + at * kPerWord<kBits>;
                Ints packed[kCount];
                for (int v = 0; v < kCount; v++)
                    packed[v] = load<Ints>(weight + (v / kPanelVectors * words + at) * kPanel + lane(v));
#pragma GCC unroll 8
                for (int i = 0; i < kPerWord<kBits>; i++)
                    for (int v = 0; v < kCount; v++) {
                        const Ints bits = i + 1 == kPerWord<kBits> ? (Ints)((Words)packed[v] >> kBits) : packed[v];
                        const int mask = ((1 << kBits) - 1) << shift_of<kBits>(i);
                        const Floats codes = __builtin_convertvector(bits & mask, Floats);
                        for (int r = 0; r < kRows; r++) sums[r][v] += codes * x[r * inputs + i];
                    }
            }
            for (int v = 0; v < kCount; v++) {
                const int64_t at = (v / kPanelVectors * groups + group) * kPanel + lane(v);
                const Floats scale = load<Floats>(scales + at), zero = load<Floats>(zeros + at);
                for (int r = 0; r < kRows; r++)
                    totals[r][v] += scale * sums[r][v] + zero * block.group_sums[r * groups + group];
            }
        }
        for (int r = 0; r < kRows; r++)
            for (int64_t o = 0; o < last - first; o++)
                block.put(matrix, r, column + o, first + o, totals[r][o / kLanes][o % kLanes]);
    }

    static void run(const Matrix& matrix, int64_t first, int64_t last, int64_t column, const Block& block) {
        for (; last - first >= kOutputs; first += kOutputs, column += kOutputs)
            run<kVectors>(matrix, first, first + kOutputs, column, block);
        for (; first < last; first += kPanel, column += kPanel)
            run<kPanelVectors>(matrix, first, std::min(last, first + kPanel), column, block);
    }
};

template <int kRows>
using Int4Tile = CodeTile<4, kRows>;
template <int kRows>
using Int8Tile = CodeTile<8, kRows>;

// ---- strips and blocks ---------------------------------------------------------------------------------------------

template <template <int> class Tile>
void run_block(int64_t num_rows, const Matrix& matrix, int64_t first, int64_t last, int64_t column,
               const Block& block) {
    switch (num_rows) {
        case 1: return Tile<1>::run(matrix, first, last, column, block);
        case 2: return Tile<2>::run(matrix, first, last, column, block);
        case 3: return Tile<3>::run(matrix, first, last, column, block);
        case 4: return Tile<4>::run(matrix, first, last, column, block);
        case 5: return Tile<5>::run(matrix, first, last, column, block);
        case 6: return Tile<6>::run(matrix, first, last, column, block);
    }
}

template <template <int> class Tile>
void run_strips(const Matrix& matrix, int64_t first, int64_t last, int64_t num_rows, const Block& all) {
    const int64_t blocks = (num_rows + kMaxRows - 1) / kMaxRows;
    for (int64_t o = first; o < last; o += kStrip)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t row = num_rows * b / blocks, end = num_rows * (b + 1) / blocks;
            Block block = all;
            block.rows += row * matrix.inputs;
            block.group_sums += row * (matrix.inputs / kGroup);
            block.outputs += row * all.output_stride;
            run_block<Tile>(end - row, matrix, o, std::min(last, o + kStrip), o - first, block);
        }
}

// Rows times 2^-shift of their codes, and each group's sum, to be multiplied by its zero.
template <int kBits>
void prepare(const float* rows, int64_t count, float* scaled, float* group_sums) {
    for (int64_t group = 0; group < count / kGroup; group++) {
        float total = 0;
        for (int64_t i = group * kGroup; i < (group + 1) * kGroup; i++) {
            scaled[i] = rows[i] * (1.0f / (int64_t{1} << shift_of<kBits>(i)));
            total += rows[i];
        }
        group_sums[group] = total;
    }
}

}  // namespace

void multiply(const Matrix& matrix, int64_t first, int64_t last, int64_t num_rows, const float* rows, float* outputs,
              int64_t output_stride, bool adds) {
    if (matrix.bits == 32)
        return run_strips<FloatTile>(matrix, first, last, num_rows, {rows, nullptr, outputs, output_stride, adds});
    static thread_local std::vector<float> scratch;
    const int64_t count = num_rows * matrix.inputs;
    scratch.resize(count + count / kGroup);
    float* group_sums = scratch.data() + count;
    const Block block = {scratch.data(), group_sums, outputs, output_stride, adds};
    if (matrix.bits == 4) {
        prepare<4>(rows, count, scratch.data(), group_sums);
        run_strips<Int4Tile>(matrix, first, last, num_rows, block);
    } else {
        prepare<8>(rows, count, scratch.data(), group_sums);
        run_strips<Int8Tile>(matrix, first, last, num_rows, block);
    }
}

extern "C" void evenflow_linear(const Matrix* matrix, int64_t num_rows, const float* rows, float* outputs, bool adds) {
#pragma omp parallel
    {
        const Part part(matrix->outputs, kOutputUnit, omp_get_thread_num(), omp_get_num_threads());
        multiply(*matrix, part.first, part.last, num_rows, rows, outputs + part.first, matrix->outputs, adds);
    }
}
