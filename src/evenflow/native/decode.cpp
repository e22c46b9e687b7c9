// All layers of a decoder over a few rows: the same as model/cpu/decoder.py does with torch, in one call that reads each
// weight once. Threads share each layer's outputs.

#include <cmath>
#include <vector>

#include <omp.h>

#include "attention.h"
#include "linear.h"
#include "vectors.h"

struct Layer {
    Matrix qkv, output, gate_up, down;
    const float* attention_norm;
    const float* mlp_norm;
    const float* query_key_norm;  // [query and key heads, head_dim], or null
    int64_t uses_rope;
    int64_t window;  // as in AttentionShape
};

struct Model {
    const Layer* layers;
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, num_rotary_pairs;
    int64_t fixed_order;  // as in AttentionShape
    float norm_eps, attention_scale;
};

namespace {

// out = row / its root mean square * weight
void normalise(const float* row, const float* weight, int64_t size, float eps, float* out) {
    Floats squares = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) squares += load<Floats>(row + i) * load<Floats>(row + i);
    float total = sum(squares);
    for (; i < size; i++) total += row[i] * row[i];
    const float scale = 1 / std::sqrt(total / size + eps);
    for (i = 0; i < size; i++) out[i] = row[i] * scale * weight[i];
}

// Neighbours are complex numbers, multiplied by `rotations`.
void rotate(float* head, const float* rotations, int64_t num_pairs) {
    for (int64_t i = 0; i < 2 * num_pairs; i += 2) {
        const float real = head[i], imaginary = head[i + 1];
        head[i] = real * rotations[i] - imaginary * rotations[i + 1];
        head[i + 1] = real * rotations[i + 1] + imaginary * rotations[i];
    }
}

// gate = gate * sigmoid(gate) * up
void activate(float* gate, const float* up, int64_t size) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const Floats x = load<Floats>(gate + i);
        store(gate + i, x / (1.0f + exponential(-x)) * load<Floats>(up + i));
    }
    for (; i < size; i++) gate[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

// The rows of one step.
class Step {
public:
    Step(const Model& model, int64_t num_rows, float* hidden, const float* rotations)
        : model_(model),
          num_rows_(num_rows),
          hidden_(hidden),
          rotations_(rotations),
          packed_size_((model.num_heads + 2 * model.num_kv_heads) * model.head_dim),
          inner_size_(model.layers->down.inputs),
          packed_(num_rows * packed_size_),
          attended_(num_rows * model.num_heads * model.head_dim),
          inner_(num_rows * inner_size_) {}

    void run(const Span* spans, int64_t num_spans) {
        for (int64_t index = 0; index < model_.num_layers; index++) {
            const Layer& layer = model_.layers[index];
            project(layer);
            const AttentionShape shape = {model_.num_heads, model_.num_kv_heads, model_.head_dim, layer.window,
                                          model_.fixed_order, model_.attention_scale};
            evenflow_attention(spans, num_spans, index, &shape, packed_.data(), attended_.data());
            finish(layer);
        }
    }

private:
    // packed = queries, keys and values, with queries and keys rotated to their positions.
    void project(const Layer& layer) {
#pragma omp parallel
        {
            std::vector<float> normed = normed_rows(layer.attention_norm);
            multiply_part(layer.qkv, 0, packed_size_, normed.data(), packed_.data(), false);
            const int64_t num_rotated = model_.num_heads + model_.num_kv_heads;
#pragma omp barrier
#pragma omp for collapse(2) schedule(static)
            for (int64_t row = 0; row < num_rows_; row++)
                for (int64_t number = 0; number < num_rotated; number++) {
                    float* head = packed_.data() + row * packed_size_ + number * model_.head_dim;
                    if (layer.query_key_norm) {
                        const float* weight = layer.query_key_norm + number * model_.head_dim;
                        normalise(head, weight, model_.head_dim, model_.norm_eps, head);
                    }
                    const int64_t num_pairs = model_.num_rotary_pairs;
                    if (layer.uses_rope) rotate(head, rotations_ + row * 2 * num_pairs, num_pairs);
                }
        }
    }

    // hidden += output(attended), then hidden += down(silu(gate) * up).
    void finish(const Layer& layer) {
#pragma omp parallel
        {
            multiply_part(layer.output, 0, model_.hidden_size, attended_.data(), hidden_, true);
#pragma omp barrier
            std::vector<float> normed = normed_rows(layer.mlp_norm), up(num_rows_ * inner_size_);
            const Part part = multiply_part(layer.gate_up, 0, inner_size_, normed.data(), inner_.data(), false);
            multiply_part(layer.gate_up, inner_size_, inner_size_, normed.data(), up.data(), false);
            for (int64_t row = 0; row < num_rows_; row++) {
                const int64_t first = row * inner_size_ + part.first;
                activate(inner_.data() + first, up.data() + first, part.last - part.first);
            }
#pragma omp barrier
            multiply_part(layer.down, 0, model_.hidden_size, inner_.data(), hidden_, true);
        }
    }

    // Each thread normalises all rows: that is faster than waiting for the others.
    std::vector<float> normed_rows(const float* weight) const {
        std::vector<float> normed(num_rows_ * model_.hidden_size);
        for (int64_t row = 0; row < num_rows_; row++) {
            const int64_t first = row * model_.hidden_size;
            normalise(hidden_ + first, weight, model_.hidden_size, model_.norm_eps, normed.data() + first);
        }
        return normed;
    }

    // This thread's part of outputs [first, first + count) of a matrix.
    Part multiply_part(const Matrix& matrix, int64_t first, int64_t count, const float* rows, float* outputs,
                       bool adds) const {
        const Part part(count, kOutputUnit, omp_get_thread_num(), omp_get_num_threads());
        multiply(matrix, first + part.first, first + part.last, num_rows_, rows, outputs + part.first, count, adds);
        return part;
    }

    const Model& model_;
    const int64_t num_rows_;
    float* const hidden_;
    const float* const rotations_;
    const int64_t packed_size_, inner_size_;
    std::vector<float> packed_, attended_, inner_;
};

}  // namespace

// hidden: [rows, hidden_size], embedded tokens in, the last layer's output out. rotations: [rows, num_rotary_pairs],
// complex.
extern "C" void evenflow_layers(const Model* model, int64_t num_rows, float* hidden, const float* rotations,
                                const Span* spans, int64_t num_spans) {
    Step(*model, num_rows, hidden, rotations).run(spans, num_spans);
}

// out[row] = row / its root mean square * weight: the norm after the last layer, as it is computed between layers.
extern "C" void evenflow_norm(const float* rows, int64_t num_rows, int64_t size, const float* weight, float eps,
                              float* out) {
    for (int64_t row = 0; row < num_rows; row++) normalise(rows + row * size, weight, size, eps, out + row * size);
}
