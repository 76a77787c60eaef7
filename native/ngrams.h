// Predicts how a text continues from what followed the same tokens earlier in it, or in other texts.
// The longest matches of its end vote; recent matches, and those that were right before, have more weight.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "sorted_texts.h"

namespace ggufspec {

// Where a prediction is from: the text itself, a prediction of it, or other texts.
enum class Origin { text, prediction, others };

// A predicted continuation; `lengths` and `shares` hold for a token if those before it are accepted.
struct Prediction {
    std::vector<int32_t> tokens;
    std::vector<int32_t> lengths;  // how many tokens before it agree with its sources: kMostMatch at most
    std::vector<double> shares;    // of the votes; 1: all votes are for it
    Origin origin = Origin::text;
};

// The acceptance probability of predicted tokens, by class: match length, whether all votes agree, and whether they are from
// the text itself. Each starts at a prior that is shifted for the text as a whole, and is replaced by the observed frequency
// as observations come in.
class NgramAcceptance {
public:
    struct Prior {
        size_t min_length;             // the shortest match of the class
        // Where all votes agree and where not, of the text's own matches; the same of matches in other texts.
        std::array<double, 4> probabilities;
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
    std::vector<double> log_odds_, n_right_, n_seen_;  // by class; each length has the four of Prior
    std::vector<size_t> kinds_;                        // of the last prediction's tokens
    double prior_weight_, keep_, rate_;
    std::array<double, 2> shifts_{};  // of the text's own, and of others
};

// Not for two threads at once.
class Ngrams {
public:
    static constexpr size_t kMostSources = 32;      // earlier occurrences that vote [limit on time]
    static constexpr size_t kMostPredicted = 1024;  // tokens of a prediction [limit]

    // `prediction`: what the text may be, which counts as the text itself does, or null. `others`: texts to predict from
    // besides; they may grow.
    Ngrams(NgramAcceptance acceptance, std::shared_ptr<const SortedTexts> prediction,
           std::vector<std::shared_ptr<const SortedTexts>> others);

    // Makes tokens[0:n] the text: removes what differs, appends the rest. Returns the length of the common prefix. At most
    // INT32_MAX - 1 tokens.
    size_t update(const int32_t * tokens, size_t n);

    // Up to n_most tokens (kMostPredicted at most) that may follow the text; none if its last token is new.
    Prediction predict(size_t n_most);
    std::vector<double> probabilities(const Prediction & prediction) { return acceptance_.probabilities(prediction); }

    // The first n_tried tokens of the last prediction were verified: n_accepted were right, the next, if it was tried, was
    // wrong. The prediction is then discarded. Requires n_accepted <= n_tried <= its length.
    void observe(size_t n_accepted, size_t n_tried);

    // The length of the last prediction; 0 once it was observed.
    size_t n_predicted() const { return n_voters_.size(); }
    // How many earlier occurrences were compared so far: the cost of predictions, independent of a clock.
    size_t n_compared() const;

private:
    // A token: of which texts, and which of them since those began.
    using Place = std::pair<size_t, uint64_t>;

    struct Source {
        size_t texts;   // 0: the text itself; 1: its prediction; then the others
        size_t place;   // of the token it votes for
        double weight;  // by recency
    };

    struct Voter {
        Place place;
        bool agrees;  // with the predicted token
    };

    struct Record {
        int n_right = 0, n_wrong = 0;  // how often the token at a place was voted for, and came true, or did not
    };

    const SortedTexts & texts(size_t which) const { return which ? *others_[which - 1] : text_; }
    Place place(const Source & source) const { return {source.texts, texts(source.texts).n_dropped() + source.place}; }
    int32_t token(const Source & source) const;
    size_t find_sources();
    size_t add_longest(size_t first, size_t end, size_t least);
    void add_sources(size_t which, const SortedTexts::Matches & matches);
    double reliability(const Source & source) const;
    void vote(Prediction & prediction);

    NgramAcceptance acceptance_;
    SortedTexts text_;
    std::vector<std::shared_ptr<const SortedTexts>> others_;
    std::map<Place, Record> records_;

    std::vector<int32_t> predicted_;  // meanwhile
    std::vector<Source> sources_;     // that agree with all predicted tokens, the most recent first
    std::vector<Voter> voters_;       // of the last prediction: on its first token, on its second ...
    std::vector<size_t> n_voters_;    // how many those are up to each token
};

}  // namespace ggufspec
