// Strips of queries and the keys that they see: the keys of their path, packed side by side. Only tree_attention.cpp
// includes it, once per instruction set.
#pragma once

#include "tree_attention.h"
#include "vectors.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace spiral::SPIRAL_ISA {
namespace {

constexpr int64_t CHUNK = 5 * MOST_ROWS;  // most keys at once

using Buffer = std::unique_ptr<float[], decltype(&std::free)>;

Buffer buffer(int64_t floats) {
    void *p = std::aligned_alloc(64, (std::max<int64_t>(floats, 1) * 4 + 63) / 64 * 64);
    if (!p) throw std::bad_alloc();
    return {(float *)p, &std::free};
}

struct Shape {
    int64_t rows, d, padded;                // padded: D rounded up to LANES
    int64_t heads, strip, columns, strips;  // heads that read a key head; rows of a strip; queries in it; strips
    explicit Shape(const TreeAttention &x)
        : rows(x.rows), d(x.d), padded((x.d + LANES - 1) / LANES * LANES), heads(x.q.heads / x.k.heads),
          strip(heads == 1 ? 32 : 16), columns(heads * strip), strips((x.rows + strip - 1) / strip) {}
};

// `n` float32 or bfloat16 numbers from `at` on as float32 times `factor`. The largest bits without sign: of an infinity
// or nan 0x7f800000 or more.
uint32_t widen(const Heads &x, int64_t at, int64_t n, float factor, float *__restrict to) {
    uint32_t most = 0;
    if (x.is_bf16) {
        const uint16_t *const from = (const uint16_t *)x.data + at;
        for (int64_t i = 0; i < n; ++i) to[i] = as_float(uint32_t(from[i]) << 16) * factor;
    } else {
        const float *const from = (const float *)x.data + at;
        for (int64_t i = 0; i < n; ++i) to[i] = from[i] * factor;
    }
    for (int64_t i = 0; i < n; ++i) most = std::max(most, as_bits(to[i]) & 0x7fffffffu);
    return most;
}

// Rows first .. first + n - 1 of a head as float32 times `factor`, D padded with zeros. Whether all are finite.
bool copy_rows(const Heads &x, int64_t head, int64_t first, int64_t n, const Shape &s, float factor, float *to) {
    uint32_t most = 0;
    for (int64_t r = 0; r < n; ++r, to += s.padded) {
        most = std::max(most, widen(x, (first + r) * x.row_stride + head * x.head_stride, s.d, factor, to));
        std::fill(to + s.d, to + s.padded, 0.0f);
    }
    return most < 0x7f800000u;
}

// A row of a result of dtype float32 or bfloat16, rounded to nearest even.
void write_row(const float *__restrict from, const Result &x, int64_t head, int64_t row, int64_t d) {
    const int64_t at = (row * x.heads + head) * d;
    if (!x.is_bf16) {
        std::copy_n(from, d, (float *)x.data + at);
        return;
    }
    uint16_t *__restrict const to = (uint16_t *)x.data + at;
    for (int64_t i = 0; i < d; ++i) {
        const uint32_t bits = as_bits(from[i]), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        to[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : rounded);
    }
}

// One head of k or v as float32 (rows, padded), for all threads of a team.
struct HeadRows {
    Buffer rows;
    std::atomic<bool> finite{true};
    explicit HeadRows(const Shape &s) : rows(buffer(s.rows * s.padded)) {}

    void load(const Heads &x, int64_t head, const Shape &s) {
#pragma omp single
        finite = true;
#pragma omp for schedule(static)
        for (int64_t first = 0; first < s.rows; first += CHUNK)
            if (!copy_rows(x, head, first, std::min(CHUNK, s.rows - first), s, 1, rows.get() + first * s.padded))
                finite = false;
    }
};

// Up to CHUNK keys of a strip, ascending. The first `full` are seen by all of its rows.
struct Chunk {
    const int32_t *key;
    int64_t n, full;
    bool together() const { return key[n - 1] - key[0] == n - 1; }
    // Their rows of x (rows, width): where they lie, or packed into `to`.
    const float *rows(const float *x, int64_t width, float *to) const {
        if (together()) return x + key[0] * width;
        for (int64_t i = 0; i < n; ++i) std::copy_n(x + key[i] * width, width, to + i * width);
        return to;
    }
};

// Rows on the path of a row, which are those that it sees, itself last: runs with siblings' subtrees between them.
struct Paths {
    const int32_t *until;
    std::vector<int32_t> above, run, length;  // row before it on its path or -1; first row of its run; rows of the path

    explicit Paths(const TreeAttention &x) : until(x.visible_until), above(x.rows), run(x.rows), length(x.rows) {
        for (int32_t row = 0; row < (int32_t)x.rows; ++row) {
            int32_t last = row - 1;
            while (last >= 0 && until[last] <= row) last = above[last];
            above[row] = last;
            run[row] = last >= 0 && last == row - 1 ? run[last] : row;
            length[row] = last >= 0 ? length[last] + 1 : 1;
        }
    }

    // The keys that any of the rows first .. end - 1 sees are those on the path of the first, and these rows.
    // Calls `work` with chunks of them; `keys` is scratch.
    template <typename Work>
    void chunks(int32_t first, int32_t end, const Shape &s, std::vector<int32_t> &keys, Work work) const {
        int64_t at = length[first] - 1, full = at;
        keys.resize(at + end - first);
        for (int32_t row = first; row < end; ++row) keys[at + row - first] = row;
        for (int32_t last = above[first]; last >= 0; last = above[run[last]])
            for (int32_t row = last; row >= run[last]; --row) keys[--at] = row;
        while (full > 0 && until[keys[full - 1]] < end) --full;  // along a path `until` does not grow
        if (end - first < s.strip) full = 0;  // columns past the last row see nothing
        for (int64_t c = 0; c < (int64_t)keys.size(); c += CHUNK) {
            const int64_t n = std::min<int64_t>(CHUNK, keys.size() - c);
            work(Chunk{keys.data() + c, n, std::clamp<int64_t>(full - c, 0, n)});
        }
    }
};

// Strips of neighbouring rows that one thread takes. Their gradients of keys lie without gaps: those above the first
// row on its path, then its own rows. So parts need few rows more than the tree has, however many threads there are.
struct Part {
    int32_t first, end;
    int64_t at;  // where its gradients begin
    bool reads(int32_t key, const Paths &paths) const {
        return key < end && (key >= first || paths.until[key] > first);
    }
    int64_t place(int32_t key, const Paths &paths) const {
        return at + (key < first ? paths.length[key] : key - first + paths.length[first]) - 1;
    }
    int64_t end_at(const Paths &paths) const { return place(end - 1, paths) + 1; }
};

// At most `most` parts of about equal work.
std::vector<Part> parts_of(int most, const Shape &s, const Paths &paths) {
    std::vector<int64_t> work(s.strips + 1);
    for (int64_t i = 0; i < s.strips; ++i) work[i + 1] = work[i] + paths.length[i * s.strip] + s.strip;
    std::vector<Part> parts;
    int64_t at = 0;
    for (int32_t first = 0, p = 1; p <= most; ++p) {
        const auto last = std::lower_bound(work.begin(), work.end(), work.back() * p / most);
        const int32_t end = (int32_t)std::min((last - work.begin()) * s.strip, s.rows);
        if (end == first) continue;
        parts.push_back({first, end, at});
        at = parts.back().end_at(paths);
        first = end;
    }
    return parts;
}

}  // namespace
}  // namespace spiral::SPIRAL_ISA
