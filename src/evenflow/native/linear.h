// Products of a few rows with a matrix; each weight is read once for all rows.

#pragma once

#include <cstdint>

// weight: bits == 32: float32, [outputs, inputs].
//         bits == 4, 8: codes, weight = code * scale + zero, with a scale and a zero per group of 32 inputs.
//         Panels of 16 outputs: codes [panel, inputs * bits / 32, 16] in 32-bit words that hold neighbouring inputs,
//         lowest bits first; scales, zeros [panel, inputs / 32, 16]. The last panel is padded with zeros.
struct Matrix {
    const void* weight;
    const float* scales;
    const float* zeros;
    const float* bias;  // or null
    int64_t outputs, inputs, bits;
};

// The share of `count` for thread `number` of `threads`, in multiples of `unit`.
struct Part {
    int64_t first, last;
    Part(int64_t count, int64_t unit, int64_t number, int64_t threads) {
        const int64_t units = (count + unit - 1) / unit;
        first = units * number / threads * unit;
        last = units * (number + 1) / threads * unit;
        if (last > count) last = count;
    }
};

constexpr int64_t kOutputUnit = 16;  // outputs of a panel: ranges of outputs start at multiples of it

// outputs[row, output - first] (+)= rows[row] . weight[output] + bias[output], for outputs in [first, last).
void multiply(const Matrix& matrix, int64_t first, int64_t last, int64_t num_rows, const float* rows, float* outputs,
              int64_t output_stride, bool adds);
