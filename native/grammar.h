// Which tokens of a vocabulary may follow a text, by a grammar. llama.cpp's parser states are cached by
// text, so a caller may pass any text. Uses the sampler functions of the loaded libllama; llama.cpp is
// not linked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "chain.h"

namespace ggufspec {

struct CandidateArray {  // llama_token_data_array of llama.h; Python compares it with llama-cpp-python's
    Candidate * data;
    size_t size;
    int64_t selected;
    bool sorted;
};

struct GrammarFunctions {
    void (*accept)(void *, int32_t);              // llama_sampler_accept
    void (*apply)(const void *, CandidateArray *);  // llama_sampler_apply
    void * (*clone)(const void *);                // llama_sampler_clone
    void (*free)(void *);                         // llama_sampler_free
    bool (*is_end)(const void *, int32_t);        // llama_vocab_is_eog
};

// Not for two threads at once. The vocabulary must outlive it.
class Grammar {
public:
    // `start`: a llama_sampler of the grammar at its beginning; this object owns it. `vocab`: the
    // llama_vocab of n_vocab tokens that it was made for.
    Grammar(GrammarFunctions functions, void * start, const void * vocab, size_t n_vocab);

    // From now on the grammar applies to the text after the first n_start tokens (the prompt).
    void begin(size_t n_start) { n_start_ = n_start; }

    // Sets the logit of every candidate that may not follow `tokens` to -infinity. False if nothing can:
    // the text violates the grammar, or a token that ends a generation has ended it; the candidates
    // are then untouched. All ids lie in the vocabulary, and n_tokens is at least n_start.
    bool apply(const int32_t * tokens, size_t n_tokens, Candidate * candidates, size_t n_candidates);

    size_t n_start() const { return n_start_; }
    size_t n_vocab() const { return n_vocab_; }

private:
    using State = std::unique_ptr<void, void (*)(void *)>;

    struct Kept {
        State state;
        std::vector<bool> allowed;  // (n_vocab) whether each token may follow; empty if not all were checked
    };

    Kept * kept_after(const int32_t * text, size_t n_text);
    void rewind(size_t n_tokens);
    bool extend(int32_t token, bool keep);
    bool allows(int32_t token) const;
    void ask_of_all(Kept & kept) const;
    State copy_of(const State & state) const;
    bool is_kept(size_t n_tokens) const { return tokens_.size() - n_tokens < states_.size(); }

    GrammarFunctions functions_;
    const void * vocab_;
    size_t n_vocab_;
    size_t n_start_ = 0;
    State start_;
    std::vector<int32_t> tokens_;  // the text of states_; none of them ends a generation
    std::deque<Kept> states_;      // after each of the last tokens, the newest state last: never empty
};

}  // namespace ggufspec
