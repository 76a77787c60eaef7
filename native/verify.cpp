#include "verify.h"

#include <algorithm>
#include <vector>

namespace ggufspec {
namespace {

double drafted(const Judged & judged, size_t i) { return judged.draft ? judged.draft[i].of(judged.tokens[i]) : 1.0; }

// The children of each node (-1: of the text). A chain needs no memory for them.
class Children {
public:
    explicit Children(const Judged & judged) : n_(static_cast<int32_t>(judged.n_draft)), is_tree_(judged.parents) {
        if (!is_tree_) return;
        first_.assign(n_ + 1, -1);
        next_.assign(n_, -1);
        for (int32_t node = n_; node-- > 0;) {
            next_[node] = first_[judged.parents[node] + 1];
            first_[judged.parents[node] + 1] = node;
        }
    }

    int32_t first(int32_t node) const { return is_tree_ ? first_[node + 1] : node + 1 < n_ ? node + 1 : -1; }
    int32_t next(int32_t node) const { return is_tree_ ? next_[node] : -1; }

private:
    int32_t n_;
    bool is_tree_;
    inline static thread_local std::vector<int32_t> first_, next_;
};

const Row & proposal(const Judged & judged, int32_t node) {
    thread_local Row certain;
    if (judged.draft) return judged.draft[node];
    return certain = Row::certain(judged.tokens[node]);
}

// The target's distribution after a node: its row, or the residual distribution after rejected children.
struct Left {
    const Row * row;
    Row rest;

    // Becomes the residual after a rejected child: max(factor * row - draft, 0), normalised. Returns the sum before.
    double reject(const Judged & judged, int32_t child, double factor) {
        const double sum = rest.set_excess(*row, static_cast<float>(factor), proposal(judged, child));
        if (sum > 0) row = &rest;
        return sum;
    }

    // The sum that `reject` returns, without computing the whole distribution; pick_excess draws from that distribution.
    double excess(const Judged & judged, int32_t child, double factor) const {
        return std::max(factor - row->overlap(static_cast<float>(factor), proposal(judged, child)), 0.0);
    }

    int32_t pick_excess(const Judged & judged, int32_t child, double factor, double uniform) const {
        return row->pick_excess(static_cast<float>(factor), proposal(judged, child), uniform);
    }
};

// A node on the path that is tested. ratio: the target's probability of the path divided by the draft's, at most 1; after
// rejected children, that of the residual distribution.
struct Step {
    int32_t node;
    double ratio;
    Left left;

    void start(const Judged & judged, int32_t from, double covered) {
        node = from;
        ratio = covered;
        left.row = &judged.target[from + 1];
    }
};

}  // namespace

Verdict match(const Judged & judged) {
    const Children children(judged);
    int32_t node = -1;
    for (size_t depth = 0;; depth++) {
        const int32_t drawn = judged.target[node + 1].pick(judged.uniforms[depth]);
        int32_t child = children.first(node);
        while (child >= 0 && judged.tokens[child] != drawn) child = children.next(child);
        if (child < 0) return {node, drawn};
        node = child;
    }
}

Verdict rejection(const Judged & judged) {
    const Children children(judged);
    const double last_uniform = judged.uniforms[judged.n_draft];
    thread_local Left left;
    int32_t node = -1;
    for (;;) {
        left.row = &judged.target[node + 1];
        int32_t child = children.first(node);
        if (child < 0) return {node, left.row->pick(last_uniform)};
        while (judged.uniforms[child] * drafted(judged, child) >= left.row->of(judged.tokens[child])) {
            const int32_t next = children.next(child);
            if (next < 0) return {node, left.pick_excess(judged, child, 1.0, last_uniform)};
            left.reject(judged, child, 1.0);
            child = next;
        }
        node = child;
    }
}

Verdict traversal(const Judged & judged) {
    const Children children(judged);
    const double last_uniform = judged.uniforms[judged.n_draft];
    thread_local std::vector<Step> steps;  // the path from the text to the tested node
    if (steps.size() <= judged.n_draft) steps.resize(judged.n_draft + 1);
    Step * last = steps.data();
    last->start(judged, -1, 1.0);
    const auto descend = [&](int32_t node) {
        for (; node >= 0 && last->ratio > 0; node = children.first(node)) {
            const double draft = drafted(judged, node);
            const double covered = last->ratio * last->left.row->of(judged.tokens[node]);
            (++last)->start(judged, node, covered < draft ? covered / draft : 1.0);
        }
    };
    descend(children.first(-1));
    // Most rounds accept the first leaf and never read a whole distribution.
    while (last->node >= 0 && judged.uniforms[last->node] >= last->ratio) {
        int32_t next;
        do {
            const int32_t child = (last--)->node;
            next = children.next(child);
            if (next >= 0) {
                const double excess = last->left.reject(judged, child, last->ratio), rest = excess + (1 - last->ratio);
                last->ratio = rest > 0 ? excess / rest : 1.0;  // else both are equal, and the rejection is due to rounding
                descend(next);
            } else if (last->node < 0) {
                return {-1, last->left.pick_excess(judged, child, last->ratio, last_uniform)};
            } else {
                const double excess = last->left.excess(judged, child, last->ratio), rest = excess + (1 - last->ratio);
                if (!(rest > 0) || judged.uniforms[last->node] * rest < excess) {
                    return {last->node, last->left.pick_excess(judged, child, last->ratio, last_uniform)};
                }
            }
        } while (next < 0);
    }
    return {last->node, last->left.row->pick(last_uniform)};
}

}  // namespace ggufspec
