// Compiled once per instruction set (SPIRAL_ISA). Queries lie along the vector lanes: scores need no sum across lanes,
// keys and values are read in place.
#include "decode_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace spiral::SPIRAL_ISA {
namespace {

constexpr int TILE = 64;    // keys at a time, counted from the start of a path or run
constexpr int BLOCK = 8;    // keys whose scores are formed together; divides TILE

inline Vector max(Vector a, Vector b) { return a > b ? a : b; }

inline float as_float(float x) { return x; }
inline float as_float(bfloat16 x) { return as_float(uint32_t(x.bits) << 16); }
inline void put(float &to, float x) { to = x; }
inline void put(bfloat16 &to, float x) {  // round to nearest even; NaN stays NaN
    const uint32_t bits = as_bits(x);
    to.bits = uint16_t(x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Scratch of one thread: the softmax of some queries over the keys seen so far.
template <typename T> struct Softmax {
    int64_t head_dim, width;       // width: head_dim padded to whole vectors
    int64_t queries = 0, lanes = 0;  // lanes: queries padded to whole vectors
    std::vector<float> query;      // (head_dim, lanes), scaled
    std::vector<float> highest, total;  // (lanes,)
    std::vector<float> sum;        // (queries, width): of exp(score - highest) * value
    std::vector<float> weight;     // (TILE, lanes)
    std::vector<float> factor;     // (lanes,)
    std::vector<float> copies;     // keys, then values of a tile (TILE, width) where they cannot be read in place
    const float *key_of[TILE], *value_of[TILE];

    explicit Softmax(int64_t head_dim) : head_dim(head_dim), width(rounded_up(head_dim, LANES)), copies(2 * TILE * width) {}

    void begin(int64_t n) {
        queries = n;
        lanes = rounded_up(n, LANES);
        query.assign(head_dim * lanes, 0.0f);
        highest.assign(lanes, -INFINITE);
        total.assign(lanes, 0.0f);
        sum.assign(n * width, 0.0f);
        weight.resize(TILE * lanes);
        factor.resize(lanes);
    }

    void set_query(int64_t i, const T *from, float scale) {
        for (int64_t d = 0; d < head_dim; ++d) query[d * lanes + i] = as_float(from[d]) * scale;
    }

    // The next n <= TILE keys. visible (lanes,) or null: how many of them each query sees.
    void add(const T *keys, const T *values, int64_t stride, const int64_t *slots, int n, const int32_t *visible) {
        find(key_of, 0, keys, stride, slots, n);
        find(value_of, 1, values, stride, slots, n);
        for (int n_done = 0; n_done < n; n_done += BLOCK) {
            int64_t q = 0;
            for (; q + 2 * LANES <= lanes; q += 2 * LANES) scores<2>(n_done, n, q);
            for (; q < lanes; q += LANES) scores<1>(n_done, n, q);
        }
        for (int64_t q = 0; q < lanes; q += LANES) normalise(n, q, visible);
        int64_t q = 0;
        for (; q + 4 <= queries; q += 4) weighted<4>(n, q);
        for (; q + 2 <= queries; q += 2) weighted<2>(n, q);
        for (; q < queries; ++q) weighted<1>(n, q);
    }

  private:
    void find(const float **rows, int which, const T *from, int64_t stride, const int64_t *slots, int n) {
        if constexpr (std::is_same_v<T, float>)
            if (width == head_dim) {
                for (int j = 0; j < n; ++j) rows[j] = from + slots[j] * stride;
                for (int j = n; j < TILE; ++j) rows[j] = rows[0];  // a block's last keys; their scores are not used
                return;
            }
        float *copy = copies.data() + which * TILE * width;
        for (int j = 0; j < n; ++j) {
            const T *row = from + slots[j] * stride;
            float *to = copy + j * width;
            for (int64_t d = 0; d < head_dim; ++d) to[d] = as_float(row[d]);
            for (int64_t d = head_dim; d < width; ++d) to[d] = 0;
        }
        for (int j = 0; j < TILE; ++j) rows[j] = copy + (j < n ? j : 0) * width;
    }

    template <int N> void scores(int first, int n, int64_t q) {
        Vector dot[BLOCK][N] = {};
        const float *const *keys = key_of + first;
        const float *from = query.data() + q;
        for (int64_t d = 0; d < head_dim; ++d, from += lanes) {
            Vector x[N];
            for (int v = 0; v < N; ++v) x[v] = load(from + v * LANES);
            for (int j = 0; j < BLOCK; ++j)
                for (int v = 0; v < N; ++v) dot[j][v] += keys[j][d] * x[v];
        }
        for (int j = 0; j < BLOCK && first + j < n; ++j)
            for (int v = 0; v < N; ++v) store(weight.data() + (first + j) * lanes + q + v * LANES, dot[j][v]);
    }

    void normalise(int n, int64_t q, const int32_t *visible) {
        float *at = weight.data() + q;
        const Vector before = load(highest.data() + q);
        Vector top = before;
        if (visible) {
            Integers seen;
            std::memcpy(&seen, visible + q, sizeof seen);
            for (int j = 0; j < n; ++j) store(at + j * lanes, j < seen ? load(at + j * lanes) : Vector{} - INFINITE);
        }
        for (int j = 0; j < n; ++j) top = max(load(at + j * lanes), top);
        const Vector change = exponential(before - top);
        Vector total_weight = load(total.data() + q) * change;
        for (int j = 0; j < n; ++j) {
            const Vector w = exponential(load(at + j * lanes) - top);
            total_weight += w;
            store(at + j * lanes, w);
        }
        store(highest.data() + q, top);
        store(total.data() + q, total_weight);
        store(factor.data() + q, change);
    }

    template <int Q> void weighted(int n, int64_t q) {
        int64_t d = 0;
        for (; d + 4 * LANES <= width; d += 4 * LANES) weighted_columns<Q, 4>(n, q, d);
        for (; d < width; d += LANES) weighted_columns<Q, 1>(n, q, d);
    }

    template <int Q, int N> void weighted_columns(int n, int64_t q, int64_t d) {
        Vector acc[Q][N];
        for (int i = 0; i < Q; ++i)
            for (int v = 0; v < N; ++v) acc[i][v] = load(&sum[(q + i) * width + d + v * LANES]) * factor[q + i];
        const float *w = weight.data() + q;
        for (int j = 0; j < n; ++j, w += lanes) {
            Vector x[N];
            for (int v = 0; v < N; ++v) x[v] = load(value_of[j] + d + v * LANES);
            for (int i = 0; i < Q; ++i)
                for (int v = 0; v < N; ++v) acc[i][v] += w[i] * x[v];
        }
        for (int i = 0; i < Q; ++i)
            for (int v = 0; v < N; ++v) store(&sum[(q + i) * width + d + v * LANES], acc[i][v]);
    }
};

// The queries of one key head: all rows, g queries each.
template <typename T> void set_queries(Softmax<T> &softmax, const Queries<T> &of, const int64_t *rows, int64_t n, int64_t head) {
    const int64_t g = of.query_heads / of.key_heads;
    softmax.begin(n * g);
    for (int64_t i = 0; i < n; ++i)
        for (int64_t h = 0; h < g; ++h)
            softmax.set_query(i * g + h, of.query + (rows[i] * of.query_heads + head * g + h) * of.head_dim, of.scale);
}

template <typename T>
void add_slots(Softmax<T> &softmax, const Queries<T> &of, int64_t head, const int64_t *slots, int64_t n) {
    for (int64_t at = 0; at < n; at += TILE)
        softmax.add(of.keys + head * of.head_dim, of.values + head * of.head_dim, of.key_heads * of.head_dim, slots + at,
                    (int)std::min<int64_t>(TILE, n - at), nullptr);
}

template <typename T> void write(const Queries<T> &of, int64_t row, int64_t head, const float *sum, float total) {
    T *out = of.out + (row * of.query_heads + head) * of.head_dim;
    for (int64_t d = 0; d < of.head_dim; ++d) put(out[d], sum[d] / total);
}

// partial of (place, query head): sum (head_dim), highest, total.
template <typename T> void attend_runs(Queries<T> of, Runs runs, Own own, float *partial, int threads) {
    const int64_t g = of.query_heads / of.key_heads, size = of.head_dim + 2;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Softmax<T> softmax(of.head_dim);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < runs.count * of.key_heads; ++item) {
            const int64_t run = item / of.key_heads, head = item % of.key_heads;
            const int64_t first = runs.rows.offsets[run], n = runs.rows.offsets[run + 1] - first;
            const int64_t slots = runs.slots.offsets[run];
            set_queries(softmax, of, runs.rows.values + first, n, head);
            add_slots(softmax, of, head, runs.slots.values + slots, runs.slots.offsets[run + 1] - slots);
            for (int64_t i = 0; i < n * g; ++i) {
                float *to = partial + ((first + i / g) * of.query_heads + head * g + i % g) * size;
                std::copy_n(&softmax.sum[i * softmax.width], of.head_dim, to);
                to[of.head_dim] = softmax.highest[i];
                to[of.head_dim + 1] = softmax.total[i];
            }
        }
#pragma omp for schedule(dynamic, 4)
        for (int64_t item = 0; item < of.rows * of.key_heads; ++item) {
            const int64_t row = item / of.key_heads, head = item % of.key_heads;
            set_queries(softmax, of, &row, 1, head);
            add_slots(softmax, of, head, own.slots + row * own.stride, own.length[row]);
            for (int64_t h = 0; h < g; ++h) {
                float *sum = &softmax.sum[h * softmax.width];
                float highest = softmax.highest[h], total = softmax.total[h];
                for (int64_t i = runs.row_places.offsets[row]; i < runs.row_places.offsets[row + 1]; ++i) {
                    const float *from = partial + (runs.row_places.values[i] * of.query_heads + head * g + h) * size;
                    const float top = std::max(highest, from[of.head_dim]);
                    const float mine = std::exp(highest - top), theirs = std::exp(from[of.head_dim] - top);
                    for (int64_t d = 0; d < of.head_dim; ++d) sum[d] = sum[d] * mine + from[d] * theirs;
                    total = total * mine + from[of.head_dim + 1] * theirs;
                    highest = top;
                }
                write(of, row, head * g + h, sum, total);
            }
        }
    }
}

constexpr int64_t ROWS = 32;  // rows of a group that share a pass over its path

template <typename T> void attend_paths(Queries<T> of, Paths paths, int threads) {
    const int64_t g = of.query_heads / of.key_heads;
    std::vector<int64_t> pieces;  // group and first row of up to ROWS rows each
    for (int64_t group = 0; group < paths.count; ++group)
        for (int64_t at = paths.rows.offsets[group]; at < paths.rows.offsets[group + 1]; at += ROWS)
            pieces.insert(pieces.end(), {group, at});
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Softmax<T> softmax(of.head_dim);
        std::vector<int32_t> visible;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < int64_t(pieces.size() / 2) * of.key_heads; ++item) {
            const int64_t piece = item / of.key_heads, head = item % of.key_heads;
            const int64_t group = pieces[2 * piece], first = pieces[2 * piece + 1];
            const int64_t n = std::min(ROWS, paths.rows.offsets[group + 1] - first);
            const int64_t *rows = paths.rows.values + first, *slots = paths.slots.values + paths.slots.offsets[group];
            const int64_t *sees = paths.visible + first;
            set_queries(softmax, of, rows, n, head);
            visible.assign(softmax.lanes, 0);
            const int64_t end = *std::max_element(sees, sees + n);
            for (int64_t at = 0; at < end; at += TILE) {
                const int tile = (int)std::min<int64_t>(TILE, end - at);
                for (int64_t i = 0; i < n * g; ++i)
                    visible[i] = (int32_t)std::max<int64_t>(0, std::min<int64_t>(tile, sees[i / g] - at));
                softmax.add(of.keys + head * of.head_dim, of.values + head * of.head_dim, of.key_heads * of.head_dim,
                            slots + at, tile, visible.data());
            }
            for (int64_t i = 0; i < n * g; ++i)
                write(of, rows[i / g], head * g + i % g, &softmax.sum[i * softmax.width], softmax.total[i]);
        }
    }
}

}  // namespace

extern const DecodeKernels decode_kernels;
const DecodeKernels decode_kernels = {attend_runs<float>, attend_runs<bfloat16>, attend_paths<float>,
                                      attend_paths<bfloat16>};

}  // namespace spiral::SPIRAL_ISA
