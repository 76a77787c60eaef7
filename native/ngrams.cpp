#include "ngrams.h"

#include <algorithm>
#include <array>

namespace ggufspec {

namespace {

// A match in other texts must be this many times as long as one in the text itself [measured on recorded texts: after two
// matching tokens in the text, 58 % of the next tokens are right; after six in other texts, 64 %; after three, 72 %; after
// nine, 71 %].
constexpr size_t kOwnWorth = 3;

// Weight of a match relative to the next more recent one [measured: better on code and prose than 0 (only the most recent
// match counts) and than 1 (all count the same)].
constexpr double kOlder = 0.85;

}  // namespace

NgramAcceptance::NgramAcceptance(const std::vector<Prior> & priors, double prior_weight) {
    for (const Prior & prior : priors) {
        min_lengths_.push_back(prior.min_length);
        for (double p : prior.probabilities) n_right_.push_back(prior_weight * p);
    }
    n_seen_.assign(n_right_.size(), prior_weight);
}

std::vector<double> NgramAcceptance::probabilities(const Prediction & prediction) {
    kinds_.clear();
    std::vector<double> found;
    for (size_t i = 0; i < prediction.tokens.size(); i++) {
        const size_t length = size_t(std::max(prediction.lengths[i], 1));
        const size_t above = std::upper_bound(min_lengths_.begin(), min_lengths_.end(), length) - min_lengths_.begin();
        const size_t of_length = 2 * (prediction.origin == Origin::others) + (prediction.shares[i] < 1);
        const size_t kind = 4 * (above - 1) + of_length;
        found.push_back(!kinds_.empty() && kinds_.back() == kind ? found.back() : n_right_[kind] / n_seen_[kind]);
        kinds_.push_back(kind);
    }
    return found;
}

void NgramAcceptance::observe(size_t n_accepted, size_t n_tried) {
    // The first rejected token was verified as well; the tokens after it were not.
    for (size_t i = 0; i < std::min({n_tried, n_accepted + 1, kinds_.size()}); i++) {
        n_right_[kinds_[i]] += i < n_accepted;
        n_seen_[kinds_[i]]++;
    }
    kinds_.clear();
}

Ngrams::Ngrams(NgramAcceptance acceptance, std::shared_ptr<const SortedTexts> prediction,
               std::vector<std::shared_ptr<const SortedTexts>> others)
    : acceptance_(std::move(acceptance)), others_(std::move(others)) {
    if (prediction == nullptr) prediction = std::make_shared<SortedTexts>();
    others_.insert(others_.begin(), std::move(prediction));
}

size_t Ngrams::update(const int32_t * tokens, size_t n) {
    const size_t n_before = text_.tokens().size(), n_common = text_.update(tokens, n);
    if (n_common + 1 < n_before) { records_.erase(records_.lower_bound({0, n_common + 1}), records_.lower_bound({1, 0})); }
    return n_common;
}

Prediction Ngrams::predict(size_t n_most) {
    voters_.clear();
    n_voters_.clear();
    predicted_.clear();
    Prediction prediction;
    size_t length = find_sources();
    if (!sources_.empty()) prediction.origin = Origin(std::min<size_t>(sources_[0].texts, 2));
    while (!sources_.empty() && predicted_.size() < std::min(n_most, kMostPredicted)) {
        prediction.lengths.push_back(static_cast<int32_t>(length));
        vote(prediction);
        length = std::min(length + 1, SortedTexts::kMostMatch);
    }
    prediction.tokens = predicted_;
    return prediction;
}

void Ngrams::observe(size_t n_accepted, size_t n_tried) {
    acceptance_.observe(n_accepted, n_tried);
    size_t voter = 0;
    for (size_t i = 0; i < n_tried && i <= n_accepted; i++) {
        for (; voter < n_voters_[i]; voter++) {
            const auto & [place, agrees] = voters_[voter];
            if (place.first == 0 && place.second >= text_.tokens().size()) continue;  // predicted itself, or removed since
            if (i < n_accepted) (agrees ? records_[place].n_right : records_[place].n_wrong)++;
            else if (agrees) records_[place].n_wrong++;  // it is unknown whether the other votes were right
        }
    }
    voters_.clear();
    n_voters_.clear();
}

size_t Ngrams::n_compared() const {
    size_t n = text_.n_compared();
    for (const auto & other : others_) n += other->n_compared();
    return n;
}

// The token that a source votes for. After the text's end, it is the predicted token there; at another text's end, kEnd.
int32_t Ngrams::token(const Source & source) const {
    const auto & tokens = texts(source.texts).tokens();
    if (source.place < tokens.size()) return tokens[source.place];
    return source.texts ? SortedTexts::kEnd : predicted_[source.place - tokens.size()];
}

// Finds the longest matches of the text's end: in the text, unless other texts have much longer ones. Returns their length.
size_t Ngrams::find_sources() {
    sources_.clear();
    if (text_.tokens().size() < 2) return 0;
    const size_t own = add_longest(0, 2, 0);
    return std::max(own, add_longest(2, others_.size() + 1, kOwnWorth * own));
}

// Replaces the sources by the longest matches in texts `first` to `end`, if longer than `least`. Returns their length.
size_t Ngrams::add_longest(size_t first, size_t end, size_t least) {
    std::vector<SortedTexts::Matches> found;
    size_t longest = least;
    for (size_t i = first; i < end && least < SortedTexts::kMostMatch; i++) {
        found.push_back(texts(i).find(&text_.tokens().back()));
        longest = std::max(longest, found.back().length);
    }
    if (longest == least) return 0;
    sources_.clear();
    for (size_t i = 0; i < found.size(); i++) {
        if (found[i].length == longest) add_sources(first + i, found[i]);
    }
    return longest;
}

void Ngrams::add_sources(size_t which, const SortedTexts::Matches & matches) {
    for (int32_t place : texts(which).latest(matches, kMostSources - sources_.size())) {
        const double weight = sources_.empty() ? 1.0 : sources_.back().weight * kOlder;
        sources_.push_back({which, size_t(place) + 1, weight});
    }
}

// The probability that a source is right, estimated from its record.
double Ngrams::reliability(const Source & source) const {
    const auto record = records_.find(place(source));
    if (record == records_.end()) return 0.5;
    const auto [n_right, n_wrong] = record->second;
    return (n_right + 1.0) / (n_right + n_wrong + 2.0);
}

// Appends the token with the most votes, and keeps the sources that voted for it and have a next token.
void Ngrams::vote(Prediction & prediction) {
    struct Choice {
        int32_t token;
        double votes;
    };
    std::array<Choice, kMostSources> choices{};
    size_t n_choices = 0;
    double all = 0;
    for (const Source & source : sources_) {
        const int32_t voted = token(source);
        const double reliable = reliability(source);
        size_t i = 0;
        while (i < n_choices && choices[i].token != voted) i++;
        if (i == n_choices) choices[n_choices++] = {voted, 0};
        choices[i].votes += source.weight * reliable;
        all += source.weight * std::max(reliable, 1 - reliable);  // a source that was mostly wrong is a vote against
    }
    // Of equal votes the first one wins, which is the most recent.
    const Choice best = *std::max_element(choices.begin(), choices.begin() + n_choices,
                                          [](const Choice & a, const Choice & b) { return a.votes < b.votes; });
    predicted_.push_back(best.token);
    size_t n_kept = 0;
    for (Source source : sources_) {
        const bool agrees = token(source) == best.token;
        voters_.push_back({place(source), agrees});
        if (!agrees) continue;
        source.place++;
        if (token(source) != SortedTexts::kEnd) sources_[n_kept++] = source;
    }
    sources_.resize(n_kept);
    n_voters_.push_back(voters_.size());
    prediction.shares.push_back(best.votes / all);
}

}  // namespace ggufspec
