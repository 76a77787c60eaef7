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

#include "context.h"
#include "sampling.h"
#include "verify.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Matrix = nb::ndarray<float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstMatrix = nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using TokenRow = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Coins = std::vector<double>;
using Verdict = std::pair<int32_t, int32_t>;

void require(bool holds, const std::string & message) {
    if (!holds) throw nb::value_error(message.c_str());
}

void to_probs(ConstMatrix logits, Matrix probs, const ggufspec::Sampling & sampling) {
    const size_t n_rows = logits.shape(0), n_vocab = logits.shape(1);
    require(probs.shape(0) == n_rows && probs.shape(1) == n_vocab, "to_probs: logits and probs differ in shape");
    require(n_vocab > 0, "to_probs: a row has no tokens");
    for (const auto & [token, bias] : sampling.logit_bias) {
        require(token >= 0 && static_cast<size_t>(token) < n_vocab,
                "to_probs: bias for token " + std::to_string(token) + ", outside the vocabulary");
    }
    size_t bad_row = n_rows;
    {
        nb::gil_scoped_release release;
        for (size_t i = 0; i < n_rows && bad_row == n_rows; i++) {
            if (!ggufspec::to_probs(logits.data() + i * n_vocab, n_vocab, sampling, probs.data() + i * n_vocab)) bad_row = i;
        }
    }
    require(bad_row == n_rows, "to_probs: row " + std::to_string(bad_row) + " has no finite logit to draw from");
}

int32_t pick(ConstMatrix probs, double coin) {
    require(probs.shape(0) == 1 && probs.shape(1) > 0, "pick: needs one row of tokens");
    return ggufspec::pick(probs.data(), probs.shape(1), coin);
}

ggufspec::Judged judged(const std::vector<int32_t> & tokens, const std::optional<ConstMatrix> & draft_probs,
                        const ConstMatrix & target_probs, const Coins & coins) {
    const size_t n_draft = tokens.size(), n_vocab = target_probs.shape(1);
    require(target_probs.shape(0) == n_draft + 1, "verify: target_probs needs n_draft + 1 rows");
    require(coins.size() == n_draft + 1, "verify: needs n_draft + 1 coins");
    if (draft_probs) {
        require(draft_probs->shape(0) == n_draft && draft_probs->shape(1) == n_vocab,
                "verify: draft_probs needs n_draft rows, as wide as the target's");
    }
    for (int32_t token : tokens) {
        require(token >= 0 && static_cast<size_t>(token) < n_vocab, "verify: a drafted token is outside the vocabulary");
    }
    return {tokens.data(), draft_probs ? draft_probs->data() : nullptr, target_probs.data(), coins.data(), n_draft, n_vocab};
}

Verdict match(const std::vector<int32_t> & tokens, ConstMatrix target_probs, const Coins & coins) {
    const auto verdict = ggufspec::match(judged(tokens, std::nullopt, target_probs, coins));
    return {verdict.n_accepted, verdict.next_token};
}

Verdict rejection(const std::vector<int32_t> & tokens, const std::optional<ConstMatrix> & draft_probs,
                  ConstMatrix target_probs, const Coins & coins) {
    const auto verdict = ggufspec::rejection(judged(tokens, draft_probs, target_probs, coins));
    return {verdict.n_accepted, verdict.next_token};
}

template <typename Function>
Function borrowed(uintptr_t address) {
    require(address != 0, "Context: a borrowed address is null");
    return reinterpret_cast<Function>(address);
}

void make_context(ggufspec::Context * self, uintptr_t context, uintptr_t memory, size_t n_batch, uintptr_t llama_decode,
                  uintptr_t llama_synchronize, uintptr_t llama_get_logits_ith, uintptr_t llama_memory_seq_rm) {
    const ggufspec::Functions functions{
        borrowed<decltype(ggufspec::Functions::decode)>(llama_decode),
        borrowed<decltype(ggufspec::Functions::synchronize)>(llama_synchronize),
        borrowed<decltype(ggufspec::Functions::get_logits_ith)>(llama_get_logits_ith),
        borrowed<decltype(ggufspec::Functions::seq_rm)>(llama_memory_seq_rm),
    };
    new (self) ggufspec::Context(functions, borrowed<void *>(context), borrowed<void *>(memory), n_batch);
}

int32_t resume(ggufspec::Context & self, TokenRow tokens, size_t n_most) {
    require(n_most <= tokens.shape(0), "resume: more tokens to keep than there are");
    return self.resume(tokens.data(), n_most);
}

int32_t decode(ggufspec::Context & self, const std::vector<int32_t> & tokens, size_t n_rows) {
    require(!tokens.empty() && tokens.size() <= self.n_batch(), "decode: needs 1 to n_batch tokens");
    require(n_rows <= tokens.size(), "decode: more rows than tokens");
    nb::gil_scoped_release release;
    return self.decode(tokens.data(), tokens.size(), n_rows);
}

ConstMatrix rows_at(uintptr_t address, size_t n_rows, size_t n_vocab) {
    require(address != 0, "rows_at: there are no rows at a null address");
    return ConstMatrix(reinterpret_cast<const float *>(address), {n_rows, n_vocab}, nb::handle());
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Sampling, verification and KV truncation, on plain rows of floats.";
    nb::class_<ggufspec::Sampling>(m, "Sampling", "What turns logits into a distribution.")
        .def("__init__",
             [](ggufspec::Sampling * self, double temperature, int64_t top_k, double top_p, double min_p,
                std::vector<std::pair<int32_t, float>> logit_bias) {
                 new (self) ggufspec::Sampling{temperature, top_k, top_p, min_p, std::move(logit_bias)};
             },
             nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "logit_bias"_a);
    m.def("to_probs", &to_probs, "logits"_a.noconvert(), "probs"_a.noconvert(), "sampling"_a,
          "Write the distribution of each row of logits (n, n_vocab) into probs (n, n_vocab).");
    m.def("rows_at", &rows_at, nb::rv_policy::reference, "address"_a, "n_rows"_a, "n_vocab"_a,
          "Rows of floats (n_rows, n_vocab) in place: valid as long as what lies there is.");
    m.def("pick", &pick, "probs"_a.noconvert(), "coin"_a, "Draw a token from probs (1, n_vocab) with a uniform coin in [0, 1).");
    m.def("match", &match, "tokens"_a, "target_probs"_a.noconvert(), "coins"_a,
          "Judge by equality with the target's own draws: (n_accepted, next_token).");
    m.def("rejection", &rejection, "tokens"_a, "draft_probs"_a.none(), "target_probs"_a.noconvert(), "coins"_a,
          "Judge by token-wise rejection sampling: (n_accepted, next_token).");
    nb::class_<ggufspec::Context>(m, "Context", "A llama.cpp context through borrowed addresses, for one sequence.")
        .def("__init__", &make_context, "context"_a, "memory"_a, "n_batch"_a, nb::kw_only(), "llama_decode"_a,
             "llama_synchronize"_a, "llama_get_logits_ith"_a, "llama_memory_seq_rm"_a)
        .def(
            "n_common", [](const ggufspec::Context & self, TokenRow tokens) { return self.n_common(tokens.data(), tokens.shape(0)); },
            "tokens"_a.noconvert(), "The length of the longest common prefix of what is held with tokens.")
        .def("resume", &resume, "tokens"_a.noconvert(), "n_most"_a,
             "Forget all behind the common prefix with the first n_most of tokens; how many remain, or -1 if it cannot.")
        .def("decode", &decode, "tokens"_a, "n_rows"_a,
             "Evaluate tokens behind those held, keep logits of the last n_rows; returns llama_decode's code.")
        .def("forget", &ggufspec::Context::forget, "n_tokens"_a,
             "Count tokens from position n_tokens on as not held, before a state of that many is restored.")
        .def_prop_ro("n_cells", &ggufspec::Context::n_cells, "How many tokens the sequence holds.")
        .def(
            "logits", [](const ggufspec::Context & self, int32_t i) { return reinterpret_cast<uintptr_t>(self.logits(i)); },
            "i"_a, "Address of the logits of token i of the last batch; 0 if llama.cpp keeps none.")
        .def("truncate", &ggufspec::Context::truncate, "n_tokens"_a,
             "Forget all from position n_tokens on; false where a tail cannot be dropped.")
        .def_prop_ro("decode_seconds", &ggufspec::Context::decode_seconds, "Wall time inside llama_decode so far.");
}
