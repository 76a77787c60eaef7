// Rows of distributions over the vocabulary, over logits that Python holds.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "sampling.h"
#include "unlocked.h"

namespace ggufspec::bindings {

// Rows of distributions. Rows that use logits without a copy keep the array alive.
struct Rows {
    std::vector<Row> rows;
    std::vector<State> states;  // before the token of each row that `fill` made
    size_t n = 0, n_vocab;
    size_t n_in_place = 0;  // the first rows: of `logits`
    bool has_declined = false;  // the very last row was computed, but not drawn from
    ConstMatrix logits;

    // One row more than n_most, for a declined one: others may be added before it is read.
    Rows(size_t n_most, size_t n_vocab) : rows(n_most + 1), n_vocab(n_vocab) {
        require(n_vocab > 0, "Rows: a row has no tokens");
    }

    const Row & at(size_t i) const {
        require(i < n, "Rows: there is no row of that number");
        return rows[i];
    }

    // The distributions after `text`, then after each token of `draft`, which is a tree if it has `parents`; `masks`: which
    // tokens each may have; `keep`: copy the logits.
    void add(const ConstMatrix & from, const Sampling & sampling, const TokenRow & text, const Tokens & draft,
             const Tokens & parents, const std::optional<ConstMasks> & masks, bool keep) {
        const size_t n_new = from.shape(0);
        require(from.shape(1) == n_vocab, "to_probs: logits and rows differ in shape");
        require(n + n_new < rows.size(), "to_probs: more rows than there is room for, in shape");
        require(n_new <= draft.size() + 1, "to_probs: more rows than drafted tokens and one");
        require(!masks || masks->shape(0) == n_new, "to_probs: needs one mask for each row of logits");
        for (const auto & [token, bias] : sampling.logit_bias) require_tokens(&token, 1, n_vocab);
        require_tokens(draft.data(), draft.size(), n_vocab);
        require_parents(parents, draft.size());
        size_t bad_row = n_new;
        {
            Unlocked unlocked;
            const size_t n_text = text.shape(0);
            const int64_t window = sampling.window();
            const size_t n_seen = window < 0 ? n_text : std::min<size_t>(window, n_text);
            const bool has_state = sampling.has_state();
            if (has_state) states.resize(std::max(states.size(), n_new));
            thread_local Tokens seen;
            if (window != 0) {
                seen.assign(text.data() + (n_text - n_seen), text.data() + n_text);
                seen.insert(seen.end(), draft.begin(), draft.end());
            }
            for (size_t i = 0; i < n_new && bad_row == n_new; i++) {
                size_t n_path = i;
                if (window != 0 && !parents.empty()) {
                    seen.resize(n_seen);
                    for (int32_t node = int32_t(i) - 1; node >= 0; node = parents[node]) seen.push_back(draft[node]);
                    std::reverse(seen.begin() + n_seen, seen.end());
                    n_path = seen.size() - n_seen;
                }
                Text before{seen.data(), window != 0 ? n_seen + n_path : 0};
                if (has_state) before.state = states[i] = state_of(i, sampling, draft, parents);
                if (i == 0 && sampling.state) before.banned = banned_after(n_text, *sampling.state);
                Mask mask{};
                if (masks) mask = {masks->data() + i * masks->shape(1), masks->shape(1)};
                if (rows[n + i].set(from.data() + i * n_vocab, n_vocab, sampling, before, masks ? &mask : nullptr, keep))
                    continue;
                // After a drafted token that is not allowed nothing can be drawn; an error only if it is accepted.
                if (masks && i > 0) rows[n + i] = Row::certain(-1);
                else bad_row = i;
            }
        }
        require(bad_row == n_new,
                masks ? "a row has no token that the constraint allows" : "a row has no finite logit to draw from");
        n += n_new;
    }

    // The state before the token of new row i, from the rows of the path to it.
    State state_of(size_t i, const Sampling & sampling, const Tokens & draft, const Tokens & parents) const {
        const bool is_begun = sampling.state && !sampling.state->states.empty();
        if (i == 0) return is_begun ? sampling.state->states.back() : sampling.first_state();
        const size_t parent = parents.empty() ? i - 1 : parents[i - 1] + 1;
        return state_after(states[parent], rows[n + parent], sampling, draft[i - 1]);
    }

    static State state_after(const State & state, const Row & row, const Sampling & sampling, int32_t token) {
        return sampling.next_state(state, row.observed(sampling, token, sampling.coin(state)));
    }

    static const Tokens * banned_after(size_t n_tokens, const TextState & state) {
        const auto found = state.bans.find(n_tokens);
        return found == state.bans.end() ? nullptr : &found->second;
    }

    // Moves the state of the sampling on: `nodes` of the draft were accepted, and `token` follows them.
    void advance(const Sampling & sampling, const Tokens & nodes, int32_t token) const {
        if (!sampling.has_state()) return;
        require(sampling.state != nullptr, "advance: the sampling has no state of a text");
        require_tokens(&token, 1, n_vocab);
        size_t last = 0;
        for (int32_t node : nodes) {
            last = size_t(node) + 1;
            require(node >= 0 && last < n && last < states.size(), "advance: there is no row of that node");
            sampling.state->states.push_back(states[last]);
        }
        sampling.state->states.push_back(state_after(states[last], rows[last], sampling, token));
    }

    // The row of a token that was drafted without a choice.
    void add_certain(int32_t token) {
        require_tokens(&token, 1, n_vocab);
        added() = Row::certain(token);
    }

    void add_weights(const ConstMatrix & weights) {
        require(weights.shape(1) == n_vocab && n + weights.shape(0) < rows.size(), "Rows: weights and rows differ in shape");
        for (size_t i = 0; i < weights.shape(0); i++) {
            require(rows[n + i].set_weights(weights.data() + i * n_vocab, n_vocab), "Rows: a row has no weights to draw from");
        }
        n += weights.shape(0);
    }

    Row & added() {
        require(n + 1 < rows.size(), "Rows: there is no room for another row");
        return rows[n++];
    }

    // The last row is not counted any more: see has_declined.
    void decline() {
        require(n > 0, "decline: there is no row");
        std::swap(rows[--n], rows.back());
        has_declined = true;
    }

    bool add_without(size_t i, int32_t token) {
        const auto & other = at(i);
        require_tokens(&token, 1, n_vocab);
        if (added().set_without(other, token)) return true;
        n--;
        return false;
    }

    void add_from(const Rows & other, size_t i) {
        require(n_vocab == other.n_vocab, "append_from: the rows differ in shape");
        const auto & row = other.at(i);
        added().set_copy(row);
    }

    // Before sampling where the rows are those of logits in place.
    float gap(size_t i) const {
        const auto & row = at(i);
        return i < n_in_place ? kernels.gap_of(logits.data() + i * n_vocab, n_vocab) : row.gap();
    }
};

}  // namespace ggufspec::bindings
