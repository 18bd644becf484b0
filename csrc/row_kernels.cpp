// Compiled once per instruction set (SPIRAL_ISA); the loops are plain C++ that the compiler vectorises.
#include "row_kernels.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace spiral::SPIRAL_ISA {

static inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float load(float value) { return value; }
static inline float load(bfloat16 value) { return as_float(uint32_t(value.bits) << 16); }

static inline void store(float &to, float value) { to = value; }
static inline void store(bfloat16 &to, float value) {  // round to nearest even; NaN stays NaN
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = uint16_t(value != value ? 0x7fc0 : rounded);
}

constexpr float LOWEST = -87.0f;  // exp below this is taken as exactly 0

// exp(x) for x <= 88 within 2 ulp; exactly 0 below LOWEST; NaN stays NaN.
static inline float exponential(float x) {
    float clamped = x < LOWEST ? LOWEST : x;
    float k = clamped * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer, kept in the low bits
    uint32_t exponent = as_bits(k) << 23;
    k -= 12582912.0f;
    float r = clamped - k * 0.693359375f;  // ln 2 in two parts: the first product is exact
    r = r + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;  // Cephes' polynomial for exp on [-ln 2 / 2, ln 2 / 2]
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    float result = as_float(as_bits(p) + exponent);
    return x < LOWEST ? 0.0f : result;
}

template <typename T> static void accumulate(Tile<T> tile, RowSums sums, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && tile.rows > 1)
    for (int64_t row = 0; row < tile.rows; ++row) {
        T *logits = tile.data + row * tile.columns;
        const int64_t columns = tile.columns;
        const float scale = tile.scale[row];
        const int64_t target = tile.targets[row] - tile.first;
        if (target >= 0 && target < columns) store(logits[target], -std::numeric_limits<float>::infinity());

        float highest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : highest)
        for (int64_t v = 0; v < columns; ++v) {
            float logit = load(logits[v]);
            highest = logit > highest ? logit : highest;
        }
        const float before = sums.maximum[row];
        const float maximum = std::fmax(before, highest * scale);
        // Nothing finite yet: measure from 0, which gives sums of 0 (and lets a NaN through).
        const float origin = std::isinf(maximum) && maximum < 0 ? 0.0f : maximum;

        float sum = 0, weighted = 0;
#pragma omp simd reduction(+ : sum, weighted)
        for (int64_t v = 0; v < columns; ++v) {
            float x = load(logits[v]) * scale - origin;
            float e = exponential(x);
            sum += e;
            weighted += e * (x < LOWEST ? LOWEST : x);
        }
        if (std::isinf(before) && before < 0) {
            sums.sum[row] += sum;
            sums.weighted[row] += weighted;
        } else {
            const float shift = before - origin, factor = std::exp(shift);
            sums.weighted[row] = weighted + factor * (sums.weighted[row] + (factor > 0 ? shift : 0) * sums.sum[row]);
            sums.sum[row] = sum + factor * sums.sum[row];
        }
        sums.maximum[row] = maximum;
    }
}

template <typename T> static void gradient(Tile<T> tile, RowGradient of, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && tile.rows > 1)
    for (int64_t row = 0; row < tile.rows; ++row) {
        T *logits = tile.data + row * tile.columns;
        const int64_t columns = tile.columns;
        const float scale = tile.scale[row], origin = of.origin[row], log_norm = of.log_norm[row];
        const float coefficient = of.grad[row] * scale;
#pragma omp simd
        for (int64_t v = 0; v < columns; ++v)
            store(logits[v], -coefficient * exponential(load(logits[v]) * scale - origin - log_norm));
        const int64_t target = tile.targets[row] - tile.first;
        if (target >= 0 && target < columns) store(logits[target], -coefficient * std::expm1(of.logp[row]));
    }
}

extern const RowKernels row_kernels;
const RowKernels row_kernels = {accumulate<float>, accumulate<bfloat16>, gradient<float>, gradient<bfloat16>};

}  // namespace spiral::SPIRAL_ISA
