// Compiled once per instruction set (SPIRAL_ISA); the loops are plain C++ that the compiler vectorises.
#include "row_kernels.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

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

struct Tanh {
    float value, slope;  // slope = 1 - value^2, with its digits where the value is near 1
};

static inline Tanh hyperbolic_tangent(float x) {
    const float a = std::fabs(x), z = a * a;
    const float s = 2.0f / (exponential(2 * a > 60 ? 60 : 2 * a) + 1);
    float p = -5.70498872745e-3f;  // Cephes' polynomial for tanh below 0.625
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const float small = p * z * a + a;
    const float value = a < 0.625f ? small : 1 - s;
    return {std::copysign(value, x), a < 0.625f ? 1 - small * small : s * (2 - s)};
}

using True = std::integral_constant<bool, true>;
using False = std::integral_constant<bool, false>;

struct Logit {
    float value, slope;  // soft_cap's derivative
};

// How a tile's products become l * temperature. Kept apart from the tile: a store to it cannot change these.
template <bool BIAS, bool CAP> struct Head {
    const float *bias;
    float soft_cap;

    template <typename T> Logit logit(const T *products, int64_t v) const {
        float x = load(products[v]);
        if constexpr (BIAS) x += bias[v];
        if constexpr (!CAP) return {x, 1.0f};
        const Tanh t = hyperbolic_tangent(x / soft_cap);
        return {soft_cap * t.value, t.slope};
    }
};

// Calls f(does the head have a bias, a soft cap) with constants, so that a plain head's loops hold neither.
template <typename T, typename F> static void with_head(const Tile<T> &tile, F f) {
    if (tile.bias)
        tile.soft_cap ? f(True{}, True{}) : f(True{}, False{});
    else
        tile.soft_cap ? f(False{}, True{}) : f(False{}, False{});
}

struct Range {
    int64_t begin, end;
};

constexpr float SLACK = 20.0f;  // so far a logit may lie above the origin: its exponential is far from overflow

template <bool BIAS, bool CAP, bool WRITE, typename T>
static void sums_of_rows(const Tile<T> &tile, RowSums sums, float *factors, int threads) {
    constexpr float INF = std::numeric_limits<float>::infinity();
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && tile.rows > 1)
    for (int64_t row = 0; row < tile.rows; ++row) {
        const Head<BIAS, CAP> head{tile.bias, tile.soft_cap};
        T *logits = tile.data + row * tile.columns;
        const int64_t columns = tile.columns, target = tile.targets[row] - tile.first;
        const float scale = tile.scale[row];
        const bool inside = target >= 0 && target < columns;
        const Range others[] = {{0, inside ? target : columns}, {inside ? target + 1 : columns, columns}};

        const Head<BIAS, false> uncapped{tile.bias, 0};
        float highest = -INF;
        for (const Range &range : others) {
#pragma omp simd reduction(max : highest)
            for (int64_t v = range.begin; v < range.end; ++v) {
                float x = uncapped.logit(logits, v).value;
                highest = x > highest ? x : highest;
            }
        }
        if constexpr (CAP) highest = tile.soft_cap * hyperbolic_tangent(highest / tile.soft_cap).value;
        const float before = sums.origin[row];
        if (!(highest * scale <= before + SLACK)) sums.origin[row] = std::fmax(before, highest * scale);
        // Nothing finite yet: measure from 0, which gives sums of 0 (and lets a NaN through).
        const float origin = std::isinf(sums.origin[row]) && sums.origin[row] < 0 ? 0.0f : sums.origin[row];

        float sum = 0, weighted = 0;
        for (const Range &range : others) {
#pragma omp simd reduction(+ : sum, weighted)
            for (int64_t v = range.begin; v < range.end; ++v) {
                const Logit l = head.logit(logits, v);
                float x = l.value * scale - origin;
                float e = exponential(x);
                sum += e;
                weighted += e * (x < LOWEST ? LOWEST : x);
                if constexpr (WRITE) store(logits[v], CAP ? e * l.slope : e);
            }
        }
        const bool first = std::isinf(before) && before < 0;
        const float shift = first ? 0 : before - origin, factor = first ? 1 : std::exp(shift);
        sums.weighted[row] = weighted + factor * (sums.weighted[row] + (factor > 0 ? shift : 0) * sums.sum[row]);
        sums.sum[row] = sum + factor * sums.sum[row];
        if constexpr (WRITE) {
            factors[row] = factor;
            if (inside) store(logits[target], 0);
        }
    }
}

template <typename T> static void accumulate(Tile<T> tile, RowSums sums, int threads) {
    with_head(tile, [&](auto bias, auto cap) { sums_of_rows<bias(), cap(), false>(tile, sums, nullptr, threads); });
}

template <typename T> static void exponentials(Tile<T> tile, RowSums sums, float *factors, int threads) {
    with_head(tile, [&](auto bias, auto cap) { sums_of_rows<bias(), cap(), true>(tile, sums, factors, threads); });
}

template <bool BIAS, bool CAP, bool ENTROPY, typename T>
static void gradient_of_rows(const Tile<T> &tile, RowGradient of, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && tile.rows > 1)
    for (int64_t row = 0; row < tile.rows; ++row) {
        const Head<BIAS, CAP> head{tile.bias, tile.soft_cap};
        T *logits = tile.data + row * tile.columns;
        const int64_t columns = tile.columns, target = tile.targets[row] - tile.first;
        const float scale = tile.scale[row], origin = of.origin[row], log_norm = of.log_norm[row];
        const float grad = of.grad[row] * scale;
        const float of_entropy = ENTROPY ? of.of_entropy[row] * scale : 0, entropy = ENTROPY ? of.entropy[row] : 0;
#pragma omp simd
        for (int64_t v = 0; v < columns; ++v) {
            const Logit l = head.logit(logits, v);
            const float log_p = l.value * scale - origin - log_norm;
            float d = -grad;
            if constexpr (ENTROPY) d += of_entropy * ((log_p < LOWEST ? LOWEST : log_p) + entropy);
            d *= exponential(log_p);
            if constexpr (CAP) d *= l.slope;
            store(logits[v], d);
        }
        if (target >= 0 && target < columns) store(logits[target], of.of_true[row]);
    }
}

template <typename T> static void gradient(Tile<T> tile, RowGradient of, int threads) {
    with_head(tile, [&](auto bias, auto cap) {
        if (of.of_entropy)
            gradient_of_rows<bias(), cap(), true>(tile, of, threads);
        else
            gradient_of_rows<bias(), cap(), false>(tile, of, threads);
    });
}

extern const RowKernels row_kernels;
const RowKernels row_kernels = {accumulate<float>,       accumulate<bfloat16>, exponentials<float>,
                                exponentials<bfloat16>, gradient<float>,      gradient<bfloat16>};

}  // namespace spiral::SPIRAL_ISA
