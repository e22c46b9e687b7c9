// Vectors of this CPU's widest registers, by the compiler's vector extensions: one source for AVX-512, AVX2 and NEON.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#else
constexpr int kLanes = 4, kRegisters = 32;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

template <class Vector, class Number>
inline Vector load(const Number* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

inline void store(float* to, Floats vector) { std::memcpy(to, &vector, sizeof vector); }

template <int kWidth>
struct Sum {
    typedef float Half __attribute__((vector_size(2 * kWidth)));

    template <class Vector>
    static float of(const Vector& vector) {
        Half halves[2];
        std::memcpy(halves, &vector, sizeof halves);
        return Sum<kWidth / 2>::of(halves[0] + halves[1]);
    }
};

template <>
struct Sum<2> {
    template <class Vector>
    static float of(const Vector& vector) {
        return vector[0] + vector[1];
    }
};

inline float sum(Floats vector) { return Sum<kLanes>::of(vector); }

// e^x to the last two bits of a float: 2^n by its exponent bits, the rest, in [-ln 2 / 2, ln 2 / 2], by a polynomial.
inline Floats exponential(Floats x) {
    constexpr float kWholeNumbers = 12582912.0f;  // 1.5 * 2^23: a float of this size has no fraction
    constexpr float kLog2E = 1.44269504f, kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;
    x = x < -87.0f ? Floats{} - 87.0f : x;
    x = x > 88.0f ? Floats{} + 88.0f : x;
    const Floats shifted = x * kLog2E + kWholeNumbers;
    const Floats n = shifted - kWholeNumbers;
    const Floats r = x - n * kLn2High - n * kLn2Low;
    Floats p = r * (1.0f / 720) + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Ints power = __builtin_convertvector(n, Ints) + 127;
    return p * (Floats)(power << 23);
}
