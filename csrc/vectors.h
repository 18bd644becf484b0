// Vectors of floats as wide as the instruction set (SPIRAL_ISA), and products of small matrices that lie in cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace spiral::SPIRAL_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, MOST_ROWS = 12;  // floats in a vector; MOST_ROWS x 2 vectors of sums stay in registers
#elif defined(__AVX2__)
constexpr int LANES = 8, MOST_ROWS = 6;
#else
constexpr int LANES = 4, MOST_ROWS = 6;
#endif
constexpr float INFINITE = std::numeric_limits<float>::infinity();

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef float Unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

inline Vector load(const float *p) { return *(const Unaligned *)p; }
inline void store(float *p, Vector x) { *(Unaligned *)p = x; }

inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline uint32_t as_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// 0, 1, 2 .. and `first` more.
inline Integers counted(int32_t first) {
    Integers result;
    for (int i = 0; i < LANES; ++i) result[i] = i;
    return result + first;
}

inline float total(Vector x) {
    float result = 0;
    for (int i = 0; i < LANES; ++i) result += x[i];
    return result;
}

// exp(x) for x <= 0 within 2 ulp; exactly 0 below -87; nan for nan.
inline Vector exponential(Vector x) {
    const Integers small = x < -87.0f;
    Vector clamped = small ? Vector{} - 87.0f : x;
    Vector k = clamped * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer, kept in the low bits
    const Integers exponent = (Integers)k << 23;
    k -= 12582912.0f;
    const Vector r = clamped - k * 0.693359375f + k * 2.12194440e-4f;  // ln 2 in two parts: the first product is exact
    Vector p = Vector{} + 1.9875691500e-4f;  // Cephes' polynomial for exp on [-ln 2 / 2, ln 2 / 2]
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Vector result = small ? Vector{} : (Vector)((Integers)p + exponent);
    return x == x ? result : x;
}

// C (ROWS x VECTORS * LANES) = or += A B over K. A(m, k) = a[m * a_row + k * a_column].
template <int ROWS, int VECTORS>
inline void block(int64_t K, const float *a, int64_t a_row, int64_t a_column, const float *b, int64_t b_row, float *c,
                  int64_t c_row, bool add) {
    Vector sums[ROWS][VECTORS] = {};
    for (int64_t k = 0; k < K; ++k) {
        Vector right[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) right[j] = load(b + k * b_row + j * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) {
            const Vector left = Vector{} + a[i * a_row + k * a_column];
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; ++j) sums[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) {
            float *to = c + i * c_row + j * LANES;
            store(to, add ? load(to) + sums[i][j] : sums[i][j]);
        }
}

template <int ROWS, int VECTORS, typename... Arguments> void rows_left(int rows, Arguments... arguments) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            block<ROWS, VECTORS>(arguments...);
        else
            rows_left<ROWS - 1, VECTORS>(rows, arguments...);
    }
}

template <int VECTORS>
void columns(int64_t M, int64_t K, const float *a, int64_t a_row, int64_t a_column, const float *b, int64_t b_row,
             float *c, int64_t c_row, bool add) {
    for (int64_t m = 0; m < M; m += MOST_ROWS)
        rows_left<MOST_ROWS, VECTORS>((int)std::min<int64_t>(MOST_ROWS, M - m), K, a + m * a_row, a_row, a_column, b,
                                      b_row, c + m * c_row, c_row, add);
}

// C (M x N) = or += A (M x K) B (K x N); N a multiple of LANES.
void multiply(int64_t M, int64_t N, int64_t K, const float *a, int64_t a_row, int64_t a_column, const float *b,
              int64_t b_row, float *c, int64_t c_row, bool add) {
    int64_t n = 0;
    for (; n + 2 * LANES <= N; n += 2 * LANES)
        columns<2>(M, K, a, a_row, a_column, b + n, b_row, c + n, c_row, add);
    if (n < N) columns<1>(M, K, a, a_row, a_column, b + n, b_row, c + n, c_row, add);
}

// Of two rows the pairs of blocks of STEP lanes next to the diagonal exchanged: one half of the result.
template <int STEP, bool SECOND, int... LANE>
inline Vector exchanged(Vector a, Vector b, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, ((LANE & STEP) ? LANES + LANE - !SECOND * STEP : LANE + SECOND * STEP)...);
#else
    return __builtin_shuffle(a, b, Integers{((LANE & STEP) ? LANES + LANE - !SECOND * STEP : LANE + SECOND * STEP)...});
#endif
}

template <int STEP> inline void exchange(Vector (&x)[LANES]) {
    constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i)
        if (!(i & STEP)) {
            const Vector a = x[i], b = x[i + STEP];
            x[i] = exchanged<STEP, false>(a, b, lanes);
            x[i + STEP] = exchanged<STEP, true>(a, b, lanes);
        }
    if constexpr (2 * STEP < LANES) exchange<2 * STEP>(x);
}

// to (N x M) = the transpose of x (M x N), both dense; M and N multiples of LANES.
void transpose(int64_t M, int64_t N, const float *x, float *to) {
    for (int64_t m = 0; m < M; m += LANES)
        for (int64_t n = 0; n < N; n += LANES) {
            Vector square[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i) square[i] = load(x + (m + i) * N + n);
            exchange<1>(square);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i) store(to + (n + i) * M + m, square[i]);
        }
}

}  // namespace
}  // namespace spiral::SPIRAL_ISA
