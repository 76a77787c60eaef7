// Types, shapes and the GIL. No arithmetic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kv.h"
#include "sampling.h"
#include "verify.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Matrix = nb::ndarray<float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstMatrix = nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstRow = nb::ndarray<const float, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Coins = nb::ndarray<const double, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Verdict = std::pair<int32_t, int32_t>;

void require(bool holds, const std::string & message) {
    if (!holds) throw nb::value_error(message.c_str());
}

void to_probs(ConstMatrix logits, Matrix probs, double temperature, int64_t top_k, double top_p, double min_p,
              const std::vector<int32_t> & bias_tokens, const std::vector<float> & bias_values) {
    const size_t n_rows = logits.shape(0), n_vocab = logits.shape(1);
    require(probs.shape(0) == n_rows && probs.shape(1) == n_vocab, "to_probs: logits and probs differ in shape");
    require(n_vocab > 0, "to_probs: a row has no tokens");
    require(bias_tokens.size() == bias_values.size(), "to_probs: bias tokens and values differ in number");
    for (int32_t token : bias_tokens) {
        require(token >= 0 && static_cast<size_t>(token) < n_vocab,
                "to_probs: bias for token " + std::to_string(token) + ", outside the vocabulary");
    }
    const ggufspec::Sampling sampling{temperature,        top_k,
                                      top_p,              min_p,
                                      bias_tokens.data(), bias_values.data(),
                                      bias_tokens.size()};
    size_t bad_row = n_rows;
    {
        nb::gil_scoped_release release;
        for (size_t i = 0; i < n_rows && bad_row == n_rows; i++) {
            if (!ggufspec::to_probs(logits.data() + i * n_vocab, n_vocab, sampling, probs.data() + i * n_vocab)) bad_row = i;
        }
    }
    require(bad_row == n_rows, "to_probs: row " + std::to_string(bad_row) + " has no finite logit to draw from");
}

int32_t pick(ConstRow probs, double coin) {
    require(probs.shape(0) > 0, "pick: a row has no tokens");
    return ggufspec::pick(probs.data(), probs.shape(0), coin);
}

ggufspec::Judged judged(const std::vector<int32_t> & tokens, const std::optional<ConstMatrix> & draft_probs,
                        const ConstMatrix & target_probs, const Coins & coins) {
    const size_t n_draft = tokens.size(), n_vocab = target_probs.shape(1);
    require(target_probs.shape(0) == n_draft + 1, "verify: target_probs needs n_draft + 1 rows");
    require(coins.shape(0) == n_draft + 1, "verify: needs n_draft + 1 coins");
    if (draft_probs) {
        require(draft_probs->shape(0) == n_draft && draft_probs->shape(1) == n_vocab,
                "verify: draft_probs needs n_draft rows, as wide as the target's");
    }
    for (int32_t token : tokens) {
        require(token >= 0 && static_cast<size_t>(token) < n_vocab, "verify: a drafted token is outside the vocabulary");
    }
    return {tokens.data(), draft_probs ? draft_probs->data() : nullptr, target_probs.data(), coins.data(), n_draft, n_vocab};
}

Verdict match(const std::vector<int32_t> & tokens, ConstMatrix target_probs, Coins coins) {
    const auto verdict = ggufspec::match(judged(tokens, std::nullopt, target_probs, coins));
    return {verdict.n_accepted, verdict.next_token};
}

Verdict rejection(const std::vector<int32_t> & tokens, const std::optional<ConstMatrix> & draft_probs,
                  ConstMatrix target_probs, Coins coins) {
    const auto verdict = ggufspec::rejection(judged(tokens, draft_probs, target_probs, coins));
    return {verdict.n_accepted, verdict.next_token};
}

ConstMatrix logits_rows(uintptr_t llama_get_logits_ith, uintptr_t context, int32_t first, size_t n_rows, size_t n_vocab) {
    const float * rows = ggufspec::logits(llama_get_logits_ith, context, first);
    require(rows != nullptr, "llama.cpp holds no logits for token " + std::to_string(first) + " of the last batch");
    return ConstMatrix(rows, {n_rows, n_vocab}, nb::handle());
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Sampling, verification and KV truncation, on plain rows of floats.";
    m.def("to_probs", &to_probs, "logits"_a.noconvert(), "probs"_a.noconvert(), nb::kw_only(), "temperature"_a, "top_k"_a,
          "top_p"_a, "min_p"_a, "bias_tokens"_a, "bias_values"_a,
          "Write the distribution of each row of logits (n, n_vocab) into probs (n, n_vocab).");
    m.def("pick", &pick, "probs"_a.noconvert(), "coin"_a, "Draw a token from probs (n_vocab) with a uniform coin in [0, 1).");
    m.def("match", &match, "tokens"_a, "target_probs"_a.noconvert(), "coins"_a.noconvert(),
          "Judge by equality with the target's own draws: (n_accepted, next_token).");
    m.def("rejection", &rejection, "tokens"_a, "draft_probs"_a.none(), "target_probs"_a.noconvert(), "coins"_a.noconvert(),
          "Judge by token-wise rejection sampling: (n_accepted, next_token).");
    m.def("truncate", &ggufspec::truncate, "llama_memory_seq_rm"_a, "memory"_a, "sequence"_a, "first"_a,
          nb::call_guard<nb::gil_scoped_release>(),
          "Forget the cells of a sequence from position first on; false where a tail cannot be dropped.");
    m.def("logits_rows", &logits_rows, "llama_get_logits_ith"_a, "context"_a, "first"_a, "n_rows"_a, "n_vocab"_a,
          "The logits (n_rows, n_vocab) that llama.cpp holds, in place: valid until its next decode.");
}
