// Attention of one layer over the contiguous keys and values of several sequences.

#pragma once

#include <cstdint>

// Rows of a step that are positions [start, start + length) of one sequence, whose memory is
// [layers, keys and values, KV heads, tokens, head_dim]. Strides count floats.
struct Span {
    float* kv;
    int64_t start, length;
    int64_t layer_stride, values_stride, head_stride, token_stride;
};

struct AttentionShape {
    int64_t num_heads, num_kv_heads, head_dim;  // head_dim: a multiple of 16 up to 256
    int64_t window;                             // tokens that a row sees, including itself; 0: all before it
    int64_t fixed_order;  // not 0: a row comes out bitwise the same, whatever rows are beside it
    float scale;
};

// packed: rows of [queries, keys, values] of all spans, in order. Writes the keys and values into each span's memory,
// and the attended rows into attended: [rows, num_heads * head_dim].
extern "C" void evenflow_attention(const Span* spans, int64_t num_spans, int64_t layer, const AttentionShape* shape,
                                   const float* packed, float* attended);
