// Predicts how a text continues from what followed the same tokens earlier in it, or in other texts.
// The longest matches of the text's end vote; matches that are recent or were right before have more weight.
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

// Where the matches are: in the text itself, in the caller's prediction of it, or in other texts.
enum class Origin { text, prediction, others };

// A predicted continuation; the values of a token hold if the tokens before it are accepted.
struct Prediction {
    std::vector<int32_t> tokens;
    std::vector<int32_t> lengths;  // number of tokens before it that match its sources, at most kMostMatch
    std::vector<double> shares;    // its share of the votes; 1: all votes are for it
    Origin origin = Origin::text;
};

// The acceptance probability of predicted tokens, by class: match length, whether all votes agree, and whether the match is
// in the text itself. Each class starts at a prior, and moves to the observed frequency with each observation.
class NgramAcceptance {
public:
    struct Prior {
        size_t min_length;             // the shortest match of the class
        // For matches in the text: if all votes agree, and if not; then the same two for matches in other texts.
        std::array<double, 4> probabilities;
    };

    // `prior_weight`: number of observations that a prior counts as. Requires priors by rising min_length, the first with 1.
    NgramAcceptance(const std::vector<Prior> & priors, double prior_weight);

    // The acceptance probability of each token of a prediction.
    std::vector<double> probabilities(const Prediction & prediction);

    // Learns that n_accepted of the first n_tried tokens of the last prediction were accepted.
    void observe(size_t n_accepted, size_t n_tried);

private:
    std::vector<size_t> min_lengths_;
    std::vector<double> n_right_, n_seen_;  // by class: four for each length, as in Prior, which counts here, too
    std::vector<size_t> kinds_;             // classes of the last prediction's tokens
};

// Not for two threads at once.
class Ngrams {
public:
    static constexpr size_t kMostSources = 32;      // earlier occurrences that vote [limit on time]
    static constexpr size_t kMostPredicted = 1024;  // tokens of a prediction [limit]

    // `prediction`: the caller's prediction of the text, or null; matches in it count like matches in the text. `others`:
    // further texts to predict from; they may grow.
    Ngrams(NgramAcceptance acceptance, std::shared_ptr<const SortedTexts> prediction,
           std::vector<std::shared_ptr<const SortedTexts>> others);

    // Makes tokens[0:n] the text: keeps the common prefix, and returns its length. At most INT32_MAX - 1 tokens.
    size_t update(const int32_t * tokens, size_t n);

    // Up to n_most tokens (kMostPredicted at most) that may follow the text; none if its last token is new.
    Prediction predict(size_t n_most);
    std::vector<double> probabilities(const Prediction & prediction) { return acceptance_.probabilities(prediction); }

    // Learns that, of the last prediction's first n_tried tokens, n_accepted were right and the next, if tried, was wrong.
    // Then discards the prediction. Requires n_accepted <= n_tried <= its length.
    void observe(size_t n_accepted, size_t n_tried);

    // The length of the last prediction; 0 after it was observed.
    size_t n_predicted() const { return n_voters_.size(); }
    // Number of earlier occurrences compared so far: the cost of predictions, independent of a clock.
    size_t n_compared() const;

private:
    // A token: (number of its texts in Source, its index in them, counting dropped tokens).
    using Place = std::pair<size_t, uint64_t>;

    struct Source {
        size_t texts;   // 0: the text itself; 1: its prediction; then the others
        size_t place;   // index of the token it votes for
        double weight;  // by recency
    };

    struct Voter {
        Place place;
        bool agrees;  // it voted for the predicted token
    };

    struct Record {
        int n_right = 0, n_wrong = 0;  // how often a vote for the token at a place was right, and wrong
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

    std::vector<int32_t> predicted_;  // during a prediction: its tokens so far
    std::vector<Source> sources_;     // sources that agree with all of these, the most recent first
    std::vector<Voter> voters_;       // voters of the last prediction: for its first token, its second ...
    std::vector<size_t> n_voters_;    // number of voters up to each token
};

}  // namespace ggufspec
