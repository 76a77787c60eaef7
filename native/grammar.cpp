#include "grammar.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <utility>

namespace ggufspec {

namespace {

// Rejected drafts go back by a few tokens only, and a state of a large grammar takes half a megabyte.
constexpr size_t n_states_kept = 128;

}  // namespace

Grammar::Grammar(GrammarFunctions functions, void * start, const void * vocab, size_t n_vocab)
    : functions_(functions), vocab_(vocab), n_vocab_(n_vocab), start_(start, functions.free) {
    states_.push_back({copy_of(start_), {}});
}

bool Grammar::apply(const int32_t * tokens, size_t n_tokens, Candidate * candidates, size_t n_candidates) {
    Kept * kept = kept_after(tokens + n_start_, n_tokens - n_start_);
    if (!kept) return false;
    // A query over all tokens is repeated at the same position: first for the draft, then for the target.
    if (n_candidates >= n_vocab_ && kept->allowed.empty()) ask_of_all(*kept);
    if (kept->allowed.empty()) {
        CandidateArray all{candidates, n_candidates, -1, false};
        functions_.apply(kept->state.get(), &all);
        return true;
    }
    for (size_t i = 0; i < n_candidates; i++) {
        if (!kept->allowed[candidates[i].token]) candidates[i].logit = -INFINITY;
    }
    return true;
}

void Grammar::ask_of_all(Kept & kept) const {
    std::vector<Candidate> every(n_vocab_);
    for (size_t i = 0; i < n_vocab_; i++) every[i] = {static_cast<int32_t>(i), 0.0f, 0.0f};
    CandidateArray all{every.data(), n_vocab_, -1, false};
    functions_.apply(kept.state.get(), &all);
    kept.allowed.resize(n_vocab_);
    for (size_t i = 0; i < n_vocab_; i++) kept.allowed[i] = !std::isinf(every[i].logit);
}

// Null if nothing can follow the text. States of a longer text are kept, because a draft is generated
// first and then verified from its beginning.
Grammar::Kept * Grammar::kept_after(const int32_t * text, size_t n_text) {
    const size_t n_known = std::min(n_text, tokens_.size());
    const size_t n_common = std::mismatch(text, text + n_known, tokens_.begin()).first - text;
    if (n_common < n_text || !is_kept(n_common)) rewind(n_common);
    while (tokens_.size() < n_text) {
        const size_t n_missing = n_text - tokens_.size();
        if (!extend(text[tokens_.size()], n_missing <= n_states_kept)) return nullptr;
    }
    return &states_[states_.size() - 1 - (tokens_.size() - n_text)];
}

// Drops all states after the first n_tokens, or all states if the one after n_tokens is not kept.
void Grammar::rewind(size_t n_tokens) {
    if (is_kept(n_tokens)) {
        states_.erase(states_.end() - (tokens_.size() - n_tokens), states_.end());
        tokens_.resize(n_tokens);
        return;
    }
    State start = copy_of(start_);
    states_.clear();
    tokens_.clear();
    states_.push_back({std::move(start), {}});
}

// Appends a token to the text and the state after it; without `keep`, drops the earlier states. False,
// with nothing changed, if the token may not follow.
bool Grammar::extend(int32_t token, bool keep) {
    // Checked first, because llama.cpp throws or aborts if it has to accept an impossible token. It accepts
    // an end token without recording it, so an ended text has no state.
    if (!allows(token) || functions_.is_end(vocab_, token)) return false;
    State next = copy_of(states_.back().state);
    try {
        functions_.accept(next.get(), token);
    } catch (const std::bad_alloc &) {
        throw;
    } catch (...) {
        return false;  // llama.cpp allowed the token, and then refused it
    }
    tokens_.push_back(token);
    states_.push_back({std::move(next), {}});
    while (states_.size() > (keep ? n_states_kept : 1)) states_.pop_front();
    return true;
}

bool Grammar::allows(int32_t token) const {
    if (!states_.back().allowed.empty()) return states_.back().allowed[token];
    Candidate candidate{token, 0.0f, 0.0f};
    CandidateArray one{&candidate, 1, -1, false};
    functions_.apply(states_.back().state.get(), &one);
    return !std::isinf(candidate.logit);
}

Grammar::State Grammar::copy_of(const State & state) const {
    State copy(functions_.clone(state.get()), functions_.free);
    if (!copy) throw std::bad_alloc();
    return copy;
}

}  // namespace ggufspec
