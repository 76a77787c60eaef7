// What may follow a text: what followed the same tokens earlier in it. An index over a growing text. The
// longest matches of its end vote, the more recent and the more often right the louder. No vocabulary, no
// randomness, no Python.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ggufspec {

// Tokens that may follow, and for each what speaks for it once those before it stand.
struct Guess {
    std::vector<int32_t> tokens;
    std::vector<int32_t> lengths;  // how many tokens before it agree with its sources: kMostMatch at most
    std::vector<double> shares;    // of the votes; 1: nothing speaks against it
};

// Not for two threads at once.
class Ngrams {
public:
    static constexpr size_t kMostMatch = 32;      // tokens compared: a longer match tells no more
    static constexpr size_t kMostSources = 32;    // earlier occurrences looked at, of each of the spans below
    static constexpr size_t kMostGuessed = 1024;  // tokens of a guess

    Ngrams();

    // Follows the text to tokens[0:n]: forgets all behind the common prefix, adds the rest. Returns the
    // length of that prefix. At most INT32_MAX tokens.
    size_t update(const int32_t * tokens, size_t n);

    // n_most tokens (kMostGuessed at most) that may follow the text; none where its last token is new to it.
    Guess guess(size_t n_most);

    // Of the last guess n_guessed tokens were tried: the first n_accepted came true, the next, if it was
    // tried, did not. The guess is then forgotten. Requires n_accepted <= n_guessed <= its length.
    void observe(size_t n_accepted, size_t n_guessed);

    // The length of the last guess.
    size_t n_guessed() const { return n_voters_.size(); }
    // How many earlier occurrences were looked at so far: what guesses cost, where seconds are noisy.
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
        int32_t place;  // of the token that it votes for
        double weight;  // by recency
    };

    struct Voter {
        int32_t place;
        bool agrees;  // with what was guessed
    };

    void forget_from(size_t n);
    void make_room(size_t n);
    void add(int32_t token);
    void link(size_t place);
    size_t slot(size_t place, size_t span) const;
    size_t match_length(size_t place) const;
    size_t find_sources();
    double belief(int32_t place) const;
    double vote();

    std::vector<int32_t> text_;
    std::vector<uint64_t> hashes_;  // of text_[0:0], text_[0:1] ...: that of a run follows from two of them
    std::vector<Place> places_;     // one for each token
    std::array<std::vector<int32_t>, kSpansN> last_;  // for each slot, where a run of it ended last, or -1
    std::array<uint64_t, kSpansN> powers_;
    int n_slot_bits_;

    std::vector<Source> sources_;   // that agree with all that was guessed, the most recent first
    std::vector<Voter> voters_;     // of the last guess: on its first token, on its second ...
    std::vector<size_t> n_voters_;  // how many those are up to each token
    size_t n_examined_ = 0;
};

}  // namespace ggufspec
