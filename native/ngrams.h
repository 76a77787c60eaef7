// Predicts how a text continues from what followed the same tokens earlier in it: an index over a growing text.
// The longest matches of its end vote; recent matches, and those that were right before, have more weight.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ggufspec {

// A predicted continuation; `lengths` and `shares` hold for a token if those before it are accepted.
struct Prediction {
    std::vector<int32_t> tokens;
    std::vector<int32_t> lengths;  // how many tokens before it agree with its sources: kMostMatch at most
    std::vector<double> shares;    // of the votes; 1: all votes are for it
};

// The acceptance probability of predicted tokens, by class: match length, and whether all votes agree. Each starts at a
// prior that is shifted for the text as a whole, and is replaced by the observed frequency as observations come in.
class NgramAcceptance {
public:
    struct Prior {
        size_t min_length;             // the shortest match of the class
        double unanimous, contested;   // probabilities
    };

    // `prior_weight`: observations that a prior counts as; `keep`: the weight that older observations of a class keep at
    // each further one; `rate`: learning rate of the shift that all classes share, in log-odds. Requires priors by rising
    // min_length, the first for 1.
    NgramAcceptance(const std::vector<Prior> & priors, double prior_weight, double keep, double rate);

    // The probability of each token of a prediction.
    std::vector<double> probabilities(const Prediction & prediction);

    // The first n_tried tokens of that prediction were verified, and n_accepted of them accepted.
    void observe(size_t n_accepted, size_t n_tried);

private:
    double prior(size_t kind) const;
    double probability(size_t kind) const;

    std::vector<size_t> min_lengths_;
    std::vector<double> log_odds_, n_right_, n_seen_;  // by class; each length has two: unanimous, contested
    std::vector<size_t> kinds_;                        // of the last prediction's tokens
    double prior_weight_, keep_, rate_, shift_ = 0;
};

// Not for two threads at once.
class Ngrams {
public:
    static constexpr size_t kMostMatch = 32;        // tokens compared; a longer match says no more [judgement]
    static constexpr size_t kMostSources = 32;      // earlier occurrences examined, per length of runs [limit on time]
    static constexpr size_t kMostPredicted = 1024;  // tokens of a prediction [limit]

    explicit Ngrams(NgramAcceptance acceptance);

    // Makes tokens[0:n] the indexed text: removes what differs, appends the rest. Returns the length of the common
    // prefix. At most INT32_MAX tokens.
    size_t update(const int32_t * tokens, size_t n);

    // n_most tokens (kMostPredicted at most) that may follow the text; none if its last token is new to it.
    Prediction predict(size_t n_most);
    std::vector<double> probabilities(const Prediction & prediction) { return acceptance_.probabilities(prediction); }

    // The first n_tried tokens of the last prediction were verified: n_accepted were right, the next, if it was tried, was
    // wrong. The prediction is then discarded. Requires n_accepted <= n_tried <= its length.
    void observe(size_t n_accepted, size_t n_tried);

    // The length of the last prediction; 0 once it was observed.
    size_t n_predicted() const { return n_voters_.size(); }
    // How many earlier occurrences were examined so far: the cost of predictions, independent of a clock.
    size_t n_examined() const { return n_examined_; }

private:
    // Lengths of the runs of tokens that are indexed: a match is found by the longest one that fits into it.
    static constexpr std::array<size_t, 5> kSpans{1, 2, 4, 8, 16};
    static constexpr size_t kSpansN = kSpans.size();

    struct Place {
        std::array<int32_t, kSpansN> before;  // where a run in the same slot as the one that ends here last ended, or -1
        uint16_t n_right = 0, n_wrong = 0;    // how often the token here was voted for, and came true, or did not
    };

    struct Source {
        int32_t place;  // of the token it votes for
        double weight;  // by recency
    };

    struct Voter {
        int32_t place;
        bool agrees;  // with the predicted token
    };

    void forget_from(size_t n);
    void make_room(size_t n);
    void add(int32_t token);
    void link(size_t place);
    size_t slot(size_t place, size_t span) const;
    size_t match_length(size_t place) const;
    size_t find_sources();
    double reliability(int32_t place) const;
    double vote();

    NgramAcceptance acceptance_;
    std::vector<int32_t> text_;
    std::vector<uint64_t> hashes_;  // of text_[0:0], text_[0:1] ...: that of a run follows from two of them
    std::vector<Place> places_;     // one for each token
    std::array<std::vector<int32_t>, kSpansN> last_;  // for each slot, where a run of it ended last, or -1
    std::array<uint64_t, kSpansN> powers_;
    int n_slot_bits_;

    std::vector<Source> sources_;   // that agree with all predicted tokens, the most recent first
    std::vector<Voter> voters_;     // of the last prediction: on its first token, on its second ...
    std::vector<size_t> n_voters_;  // how many those are up to each token
    size_t n_examined_ = 0;
};

}  // namespace ggufspec
