// llama.cpp's samplers over a list of candidates, with its float arithmetic and its order of equal logits, so that the
// same candidates remain. Exact but slow; sampling.cpp has shortcuts that give the same distribution.
// Source of the semantics: src/llama-sampler.cpp of llama.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace ggufspec {

enum class Sampler { penalties, dry, top_n_sigma, top_k, typical_p, top_p, min_p, xtc, mirostat, temperature, adaptive_p };

constexpr float kColdest = 1e-30f;  // at lower temperatures, logits / temperature overflow: greedy

// The sequence breakers of DRY: tokens that begin one, and the tokens that have to follow.
struct Breakers {
    std::vector<std::vector<int32_t>> tails;
    std::vector<std::pair<int32_t, uint32_t>> heads;  // (first token, index of its tail), sorted
};

// What mirostat and adaptive_p know of the tokens that they drew: a function of the text and of the model's distributions.
struct State {
    float mu = 0;            // mirostat: the largest surprise of a token, in bits
    float weighted_sum = 0;  // adaptive_p: of the tokens' probabilities; the weight of older ones decays
    float total_weight = 0;
    size_t n_tokens = 0;
};

// What was learned while a text was generated.
struct TextState {
    uint64_t seed = 0;                             // of coins, see Sampling::coin
    std::vector<State> states;                     // after each of its tokens, if a sampler needs them
    std::map<size_t, std::vector<int32_t>> bans;  // by number of tokens, with the prompt: tokens that may not follow them
};

// A bijection of 64 bits whose results look independent.
uint64_t mixed(uint64_t bits);

// The options that turn logits into a distribution.
struct Sampling {
    std::vector<Sampler> order;
    float temperature = 1;      // 0: one-hot at the largest logit
    float dynatemp_range = 0;   // 0: off
    float dynatemp_exponent = 1;
    int64_t top_k = 0;          // 0: off
    float top_p = 1;            // 1: off
    float min_p = 0;            // 0: off
    float typical_p = 1;        // 1: off
    float top_n_sigma = 0;      // 0: off
    float xtc_probability = 0;  // 0: off
    float xtc_threshold = 0;    // above 0.5: off
    int64_t penalty_last_n = 0;  // last tokens that are penalized; 0: off, -1: all
    float repeat_penalty = 1;    // 1: off
    float frequency_penalty = 0;
    float presence_penalty = 0;
    float dry_multiplier = 0;  // 0: off
    float dry_base = 1.75f;
    int64_t dry_allowed_length = 2;
    int64_t dry_last_n = 0;                             // as penalty_last_n
    std::shared_ptr<const Breakers> dry_breakers;       // null: none
    int64_t mirostat = 0;                               // 1, 2; 0: off
    float mirostat_tau = 5;                             // surprise to aim at, in bits
    float mirostat_eta = 0.1f;                          // learning rate
    float adaptive_target = -1;                         // probability to aim at; below 0: off
    float adaptive_decay = 0.9f;
    std::vector<std::pair<int32_t, float>> logit_bias;  // added first; -infinity bans a token
    std::shared_ptr<TextState> state;                   // null: at the start of a text

    bool is_active(Sampler sampler) const;
    bool is_greedy() const { return temperature < kColdest; }
    bool is_dynamic() const { return dynatemp_range > 0 && mirostat == 0; }
    // Number of last tokens of the text that the samplers depend on; -1: all.
    int64_t window() const;
    bool adapts() const { return !order.empty() && order.back() == Sampler::adaptive_p && is_active(Sampler::adaptive_p); }
    // Whether a token's distribution depends on the State.
    bool has_state() const { return adapts() || (is_active(Sampler::mirostat) && !order.empty()); }
    State first_state() const;
    // The state after a token of probability `observed`: see Row::observed.
    State next_state(State state, float observed) const;
    // A uniform in [0, 1) for the token after `state`. With xtc, the state of adaptive_p follows from the case (removed or not)
    // that a token was drawn in. Texts do not show it, so it is drawn given the token; and ahead, so that drafts can be judged.
    double coin(const State & state) const;
    // The temperature for a distribution over n tokens with this entropy (in nats, at temperature 1).
    float temperature_at(double entropy, size_t n) const;
};

struct Candidate {
    int32_t token;
    float logit;
    float prob;
};

struct Candidates {
    std::vector<Candidate> list;
    size_t n_vocab = 0;
    bool sorted = false;     // by descending logit
    bool has_ties = false;   // equal logits are adjacent, but not in llama.cpp's order
    bool cut_a_tie = false;  // a sampler removed one of two equal logits: which one depends on the order
    bool ends_in_tie = false;  // sorted, and a logit equal to the last one was removed: that matters while the last one stays
};

// The text before the token to be drawn.
struct Text {
    const int32_t * tokens;
    size_t n;
    State state{};
    const std::vector<int32_t> * banned = nullptr;  // tokens that may not follow
};

// Applies one sampler, but for xtc, which has two results; an inactive sampler changes nothing.
void apply(Sampler sampler, const Sampling & sampling, const Text & text, Candidates & candidates);

// "Exclude top choices": all but the least likely of the candidates above the threshold are removed from `others`. Returns
// false, and leaves `others`, if none is.
bool exclude_top(const Sampling & sampling, Candidates & candidates, Candidates & others);

// The number of candidates that mirostat (1) keeps, of which `list` has the most likely ones with their probabilities, sorted.
size_t mirostat_k(const State & state, size_t n_vocab, const std::vector<Candidate> & list);

}  // namespace ggufspec
