// Two passes. The first inserts the traces, one after the other, into a compressed trie that only refers to their
// tokens: a trace is compared run by run with the path it shares, and a child is found by its first token in one hash
// table, so the work is to read the tokens once and to look up one child per branch passed. The second walks the trie
// depth-first, joins runs shorter than min_shared_run to each of their children, and writes the arrays.
#include "prefix_tree.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace spiral {

// Large arrays in huge pages where the system has them: else most of the time goes into faults of 4 KB pages.
int64_t *allocate(int64_t size) {
    constexpr size_t huge = 2 << 20;
    const size_t bytes = std::max<size_t>(size * sizeof(int64_t), 1);
    const bool large = bytes >= 2 * huge;
    void *data = large ? std::aligned_alloc(huge, (bytes + huge - 1) / huge * huge) : std::malloc(bytes);
    if (!data) throw std::bad_alloc();
#ifdef __linux__
    if (large) madvise(data, bytes, MADV_HUGEPAGE);
#endif
    return static_cast<int64_t *>(data);
}

namespace {

constexpr int64_t none = -1;
constexpr int64_t root = 0;  // holds no token

struct Node {
    int64_t parent;
    int64_t begin, end;  // depths of its tokens: begin .. end - 1
    int64_t source;      // where a trace that passes through the whole node begins in `tokens`
    int64_t first_child = none, last_child = none;  // in order of first appearance
    int64_t previous = none, next = none;           // sibling
    int64_t last_trace = none;  // of those that end in this node, or would have before it was split
};

// Number of leading elements, of n, in which a and b agree.
template <typename T> int64_t agreeing(const T *a, const T *b, int64_t n) {
    constexpr int64_t block = 64;
    int64_t i = 0;
    while (i + block <= n && std::memcmp(a + i, b + i, block * sizeof(T)) == 0) i += block;
    while (i < n && a[i] == b[i]) ++i;
    return i;
}

template <typename T> class Trie {
  public:
    Trie(const T *tokens, int64_t n_traces) : next_trace(n_traces, none), tokens(tokens) {
        nodes.reserve(2 * n_traces + 1);  // a trace adds a leaf and splits a node at most
        nodes.push_back({none, 0, 0, 0});
        size_t size = 16;
        while (size < 4 * (size_t)n_traces) size *= 2;
        slots.assign(size, none);
    }

    void insert(int64_t trace, int64_t source, int64_t length) {
        int64_t node = root, depth = 0;
        while (depth < length) {
            if (node != root && nodes[node].first_child == none) {  // traces end here and none goes on: this one does
                nodes[node].end = length;
                nodes[node].source = source;
                break;
            }
            int64_t &slot = slot_of(node, tokens[source + depth]);
            if (slot == none) {
                slot = node = append(node, {node, depth, length, source});
                break;
            }
            const Node &child = nodes[slot];
            const int64_t both = std::min(length, child.end) - depth;
            depth += agreeing(tokens + source + depth, tokens + child.source + depth, both);
            if (depth < length && depth < child.end) split(slot, depth);
            node = slot;
        }
        next_trace[trace] = nodes[node].last_trace;
        nodes[node].last_trace = trace;
    }

    std::vector<Node> nodes;
    std::vector<int64_t> next_trace;  // in the list of the traces that end in the same node

  private:
    // The place of the child of `parent` that begins with `token`: its id, or none.
    int64_t &slot_of(int64_t parent, T token) {
        uint64_t hash = ((uint64_t)parent * 0x9E3779B97F4A7C15u) ^ (uint64_t)token;
        hash = (hash ^ (hash >> 32)) * 0xD6E8FEB86659FD93u;
        hash ^= hash >> 32;
        for (;; ++hash) {
            int64_t &slot = slots[hash & (slots.size() - 1)];
            if (slot == none) return slot;
            const Node &child = nodes[slot];
            if (child.parent == parent && tokens[child.source + child.begin] == token) return slot;
        }
    }

    int64_t append(int64_t parent, Node node) {
        const int64_t id = nodes.size();
        node.previous = nodes[parent].last_child;
        (node.previous == none ? nodes[parent].first_child : nodes[node.previous].next) = id;
        nodes[parent].last_child = id;
        nodes.push_back(node);
        return id;
    }

    // Puts the tokens before `depth` of the node in `slot` into a new one above, which takes its place. The lower part
    // keeps its id, by which its children are found.
    void split(int64_t &slot, int64_t depth) {
        const int64_t lower = slot, upper = nodes.size();
        Node above = nodes[lower];
        above.end = depth;
        above.first_child = above.last_child = lower;
        above.last_trace = none;
        (above.previous == none ? nodes[above.parent].first_child : nodes[above.previous].next) = upper;
        (above.next == none ? nodes[above.parent].last_child : nodes[above.next].previous) = upper;
        nodes[lower].parent = upper;
        nodes[lower].begin = depth;
        nodes[lower].previous = nodes[lower].next = none;
        nodes.push_back(above);
        slot = upper;  // first: a look-up that met `lower` here would take this for its new slot
        slot_of(upper, tokens[above.source + depth]) = lower;
    }

    const T *tokens;
    std::vector<int64_t> slots;
};

// A node of the result on the way from the root to where the walk is.
struct Step {
    int64_t trie_node, index, begin, end, start;  // index and start row in the result; depths begin .. end - 1
};

// How many tokens of each trace are computed: all, or those that a live sampled token comes after.
std::vector<int64_t> computed_lengths(const int64_t *offsets, int64_t n_traces, const bool *sampled, const bool *live) {
    std::vector<int64_t> lengths(n_traces);
    int64_t row = 0;
    for (int64_t trace = 0; trace < n_traces; ++trace) {
        if (!live) {
            lengths[trace] = offsets[trace + 1] - offsets[trace];
            continue;
        }
        for (int64_t i = offsets[trace]; i < offsets[trace + 1]; ++i)
            if (sampled[i] && live[row++]) lengths[trace] = i - offsets[trace];
    }
    return lengths;
}

Array copy(const std::vector<int64_t> &values) {
    Array array(values.size());
    std::copy(values.begin(), values.end(), array.data.get());
    return array;
}

}  // namespace

template <typename T>
PrefixTree build_prefix_tree(const T *tokens, const int64_t *offsets, int64_t n_traces, const bool *sampled,
                             const bool *live, int64_t min_shared_run) {
    const std::vector<int64_t> lengths = computed_lengths(offsets, n_traces, sampled, live);
    Trie<T> trie(tokens, n_traces);
    for (int64_t trace = 0; trace < n_traces; ++trace) trie.insert(trace, offsets[trace], lengths[trace]);
    const std::vector<Node> &nodes = trie.nodes;

    std::vector<int64_t> start, end, parent, subtree_end;
    std::vector<int64_t> source;  // where the node's first token is in `tokens`
    Array trace_rows(offsets[n_traces]);
    std::vector<Step> path;
    std::vector<int64_t> joined;  // nodes joined to their children, of which the first is still to come
    int64_t rows = 0;

    auto place_traces = [&](int64_t node) {
        for (int64_t trace = nodes[node].last_trace; trace != none; trace = trie.next_trace[trace])
            for (const Step &step : path) {
                if (step.begin >= lengths[trace]) break;
                int64_t *row = &trace_rows[offsets[trace]];
                for (int64_t i = step.begin, last = std::min(step.end, lengths[trace]); i < last; ++i)
                    row[i] = step.start + i - step.begin;
            }
    };
    auto enter = [&](int64_t node) {
        const int64_t begin = path.empty() ? 0 : path.back().end, length = nodes[node].end - begin;
        if (nodes[node].first_child != none && length < min_shared_run) {
            joined.push_back(node);
            return;
        }
        parent.push_back(path.empty() ? none : path.back().index);
        path.push_back({node, (int64_t)start.size(), begin, nodes[node].end, rows});
        source.push_back(nodes[node].source + begin);
        start.push_back(rows);
        end.push_back(rows += length);
        subtree_end.push_back(rows);
        for (int64_t above : joined) place_traces(above);
        joined.clear();
        place_traces(node);
    };
    auto leave = [&](int64_t node) {
        if (path.empty() || path.back().trie_node != node) return;
        subtree_end[path.back().index] = rows;
        path.pop_back();
    };

    for (int64_t node = root;;) {
        if (nodes[node].first_child != none) {
            node = nodes[node].first_child;
        } else {
            while (node != root && nodes[node].next == none) {
                leave(node);
                node = nodes[node].parent;
            }
            if (node == root) break;
            leave(node);
            node = nodes[node].next;
        }
        enter(node);
    }

    Array row_tokens(rows), positions(rows);
    for (size_t node = 0; node < start.size(); ++node) {
        const int64_t begin = parent[node] == none ? 0 : positions[end[parent[node]] - 1] + 1;
        for (int64_t row = start[node]; row < end[node]; ++row) {
            row_tokens[row] = tokens[source[node] + row - start[node]];
            positions[row] = begin + row - start[node];
        }
    }

    const int64_t n_edges = std::count(sampled, sampled + offsets[n_traces], true);
    Array edge_row(n_edges), edge_target(n_edges), edge_trace(n_edges), edge_position(n_edges);
    int64_t edge = 0;
    for (int64_t trace = 0; trace < n_traces; ++trace) {
        std::fill(&trace_rows[offsets[trace] + lengths[trace]], &trace_rows[offsets[trace + 1]], none);
        for (int64_t i = offsets[trace]; i < offsets[trace + 1]; ++i) {
            if (!sampled[i]) continue;
            edge_row[edge] = trace_rows[i - 1];
            edge_target[edge] = tokens[i];
            edge_trace[edge] = trace;
            edge_position[edge++] = i - offsets[trace];
        }
    }
    return {std::move(row_tokens), std::move(positions), copy(start), copy(end), copy(parent), copy(subtree_end),
            std::move(edge_row), std::move(edge_target), std::move(edge_trace), std::move(edge_position),
            std::move(trace_rows)};
}

template PrefixTree build_prefix_tree(const int32_t *, const int64_t *, int64_t, const bool *, const bool *, int64_t);
template PrefixTree build_prefix_tree(const int64_t *, const int64_t *, int64_t, const bool *, const bool *, int64_t);

}  // namespace spiral
