// Python bindings: batches of a llama.cpp context.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "context.h"
#include "images.h"
#include "unlocked.h"

namespace ggufspec::bindings {
namespace {

template <typename Function>
Function borrowed(uintptr_t address) {
    require(address != 0, "Context: a borrowed address is null");
    return reinterpret_cast<Function>(address);
}

void make_context(Context * self, uintptr_t context, uintptr_t memory, size_t n_batch, size_t n_sequences, size_t n_leaves,
                  size_t n_hidden, bool hidden_is_alone, size_t n_rollback, bool shares_cells, uintptr_t llama_decode,
                  uintptr_t llama_synchronize, uintptr_t llama_get_logits_ith, uintptr_t llama_memory_seq_rm,
                  uintptr_t llama_memory_seq_cp, uintptr_t llama_memory_seq_pos_max, uintptr_t llama_set_abort_callback) {
    require(n_sequences >= 1 && n_leaves >= 1, "Context: needs at least one sequence, and one leaf");
    const Functions functions{
        borrowed<decltype(Functions::decode)>(llama_decode),
        borrowed<decltype(Functions::synchronize)>(llama_synchronize),
        borrowed<decltype(Functions::get_logits_ith)>(llama_get_logits_ith),
        borrowed<decltype(Functions::seq_rm)>(llama_memory_seq_rm),
        borrowed<decltype(Functions::seq_cp)>(llama_memory_seq_cp),
        borrowed<decltype(Functions::seq_pos_max)>(llama_memory_seq_pos_max),
        borrowed<decltype(Functions::set_abort_callback)>(llama_set_abort_callback),
    };
    new (self) Context(functions, borrowed<void *>(context), borrowed<void *>(memory), n_batch, n_sequences, n_leaves, n_hidden,
                       hidden_is_alone, n_rollback, shares_cells);
}

void require_sequence(const Context & self, size_t sequence) {
    require(sequence < self.n_sequences(), "the context has no such sequence");
}

size_t n_common(const Context & self, TokenRow tokens, size_t sequence) {
    require_sequence(self, sequence);
    return self.n_common(sequence, tokens.data(), tokens.shape(0));
}

int32_t resume(Context & self, TokenRow tokens, size_t n_most, size_t sequence) {
    require_sequence(self, sequence);
    require(n_most <= tokens.shape(0), "resume: more tokens to keep than there are");
    return self.resume(sequence, tokens.data(), n_most);
}

void copy_prefix(Context & self, size_t source, size_t sequence, TokenRow tokens) {
    require_sequence(self, source);
    require_sequence(self, sequence);
    require(source != sequence, "copy_prefix: a sequence has its own prefix already");
    self.copy_prefix(source, sequence, tokens.data(), tokens.shape(0));
}

void drop_middle(Context & self, size_t n_first, size_t n_dropped, size_t sequence) {
    require_sequence(self, sequence);
    self.drop_middle(sequence, n_first, n_dropped);
}

void begin_restore(Context & self, size_t n_tokens, size_t sequence) {
    require_sequence(self, sequence);
    self.begin_restore(sequence, n_tokens);
}

void end_restore(Context & self, size_t sequence) {
    require_sequence(self, sequence);
    self.end_restore(sequence);
}

bool drop_tail(Context & self, size_t n_tokens, size_t sequence) {
    require_sequence(self, sequence);
    return self.truncate(sequence, n_tokens);
}

size_t n_cells(const Context & self, size_t sequence) {
    require_sequence(self, sequence);
    return self.n_cells(sequence);
}

// Runs the batch without the GIL. In the main thread, signal handlers of Python run within it; what one raises ends it.
template <typename Add, typename Run> int32_t run_batch(Context & self, const Add & add, const Run & run) {
    Unlocked::check();
    std::exception_ptr raised;
    const std::function<bool()> is_interrupted = Unlocked::interrupt(raised);
    int32_t result;
    {
        Unlocked unlocked;
        self.begin();
        add();
        result = run(is_interrupted);
    }
    if (raised) std::rethrow_exception(raised);
    Unlocked::check();
    return result;
}

template <typename Add> int32_t run_batch(Context & self, const Add & add) {
    return run_batch(self, add, [&self](const std::function<bool()> & is_interrupted) { return self.run(is_interrupted); });
}

size_t n_leaves_of(const Tokens & parents) {
    std::vector<bool> is_leaf(parents.size(), true);
    for (int32_t parent : parents) {
        if (parent >= 0) is_leaf[parent] = false;
    }
    return std::count(is_leaf.begin(), is_leaf.end(), true);
}

using Parts = std::vector<std::tuple<size_t, Tokens, size_t, Tokens>>;

void require_parts(const Context & self, const Parts & parts) {
    size_t n_tokens = 0;
    std::vector<bool> is_there(self.n_sequences());
    for (const auto & [sequence, tokens, n_rows, parents] : parts) {
        require_sequence(self, sequence);
        require(!is_there[sequence], "decode: a sequence comes twice");
        is_there[sequence] = true;
        require(!tokens.empty() && n_rows <= tokens.size(), "decode: no tokens, or more rows than tokens");
        require(parents.empty() || n_rows == parents.size() + 1, "decode: a tree needs a row for each node, and one before it");
        require_parents(parents, parents.size());
        require(n_leaves_of(parents) <= self.n_leaves(), "decode: the tree has more leaves than the context reads (n_leaves)");
        n_tokens += tokens.size();
    }
    require(n_tokens >= 1 && n_tokens <= self.n_batch(), "decode: needs 1 to n_batch tokens");
}

void add_parts(Context & self, const Parts & parts) {
    for (const auto & [sequence, tokens, n_rows, parents] : parts) {
        self.add(sequence, tokens.data(), tokens.size(), n_rows, nullptr, parents.data(), parents.size());
    }
}

int32_t decode(Context & self, const Parts & parts) {
    require_parts(self, parts);
    return run_batch(self, [&] { add_parts(self, parts); });
}

std::pair<int32_t, int32_t> decode_beside(Context & self, const Parts & parts, Context & other, const Parts & others) {
    require(&self != &other, "decode_beside: needs another context");
    require_parts(self, parts);
    require_parts(other, others);
    std::pair<int32_t, int32_t> results;
    run_batch(
        self, [&] { add_parts(self, parts); },
        [&](const std::function<bool()> & is_interrupted) {
            other.begin();
            add_parts(other, others);
            results = run_beside(self, other, is_interrupted);
            return results.first;
        });
    return results;
}

int32_t decode_hidden(Context & self, size_t sequence, TokenRow tokens, ConstMatrix hidden, size_t n_rows) {
    require_sequence(self, sequence);
    const size_t n = tokens.shape(0);
    require(n >= 1 && n <= self.n_batch() && n_rows <= n, "decode_hidden: needs 1 to n_batch tokens, and at most as many rows");
    require(hidden.shape(0) == n && hidden.shape(1) == self.n_hidden(), "decode_hidden: needs n_hidden numbers for each token");
    return run_batch(self, [&] { self.add(sequence, tokens.data(), n, n_rows, hidden.data()); });
}

int32_t decode_image(Context & self, size_t sequence, TokenRow tokens, ConstMatrix embeddings, TokenRow offsets) {
    require_sequence(self, sequence);
    const size_t n = tokens.shape(0), n_offsets = offsets.shape(0);
    require(n >= 1 && embeddings.shape(0) == n, "decode_image: needs an embedding for each cell");
    require(n_offsets % n == 0 && (n_offsets == n || n_offsets == 4 * n), "decode_image: needs 1 or 4 positions for each cell");
    require(!images::is_inside(tokens.data()[n - 1]) && tokens.data()[n - 1] < 0, "decode_image: the image is incomplete");
    return run_batch(
        self, [] {},
        [&](const std::function<bool()> & is_interrupted) {
            return self.run_image(sequence, tokens.data(), n, embeddings.data(), embeddings.shape(1), offsets.data(),
                                  n_offsets / n, is_interrupted);
        });
}

}  // namespace

void bind_context(nb::module_ & m) {
    nb::class_<Context>(m, "Context", "A llama.cpp context, used through borrowed addresses. Sequences are numbered from 0.")
        .def("__init__", &make_context, "context"_a, "memory"_a, "n_batch"_a, "n_sequences"_a = 1, "n_leaves"_a = 1,
             "n_hidden"_a = 0, "hidden_is_alone"_a = false, "n_rollback"_a = 0, "shares_cells"_a = false, nb::kw_only(),
             "llama_decode"_a, "llama_synchronize"_a, "llama_get_logits_ith"_a, "llama_memory_seq_rm"_a, "llama_memory_seq_cp"_a,
             "llama_memory_seq_pos_max"_a, "llama_set_abort_callback"_a)
        .def("n_common", &n_common, "tokens"_a.noconvert(), "sequence"_a = 0,
             "The length of the longest common prefix of the held tokens and tokens.")
        .def("resume", &resume, "tokens"_a.noconvert(), "n_most"_a, "sequence"_a = 0,
             "Truncate to the common prefix with the first n_most of tokens. Returns the number of tokens that remain, or -1 if "
             "a\n"
             "tail cannot be dropped.")
        .def(
            "decode", &decode, "parts"_a,
            "Evaluate parts (sequence, tokens, n_rows, parents) in one batch: for each, the tokens after those that are held.\n\n"
            "Keeps logits of the last n_rows of each part; returns llama_decode's code. parents: for a tree at the end of the\n"
            "tokens, the parent of each node, -1 for the token before the tree; empty for a chain.\n\n"
            "On a CPU, an exception of a signal handler ends a long batch; none of the tokens is then held.")
        .def("decode_beside", &decode_beside, "parts"_a, "other"_a, "parts_of_other"_a,
             "decode, and at the same time decode in another context, in another thread; returns both codes.\n\n"
             "An exception of a signal handler ends both.")
        .def("decode_hidden", &decode_hidden, "sequence"_a, "tokens"_a.noconvert(), "hidden"_a.noconvert(), "n_rows"_a,
             "decode for one sequence, with a hidden state (n_tokens, n_hidden) for each token, or instead of the tokens.")
        .def("decode_image", &decode_image, "sequence"_a, "tokens"_a.noconvert(), "embeddings"_a.noconvert(),
             "offsets"_a.noconvert(),
             "decode for the cells of an image: embeddings (n_tokens, width), and offsets of 1 or 4 positions (n, n_tokens).")
        .def("copy_prefix", &copy_prefix, "source"_a, "sequence"_a, "tokens"_a.noconvert(),
             "Replace a sequence by the longest prefix of tokens that source holds.")
        .def("drop_middle", &drop_middle, "n_first"_a, "n_dropped"_a, "sequence"_a = 0,
             "Drop n_dropped tokens after the first n_first; the tokens after them keep their positions.")
        .def("begin_restore", &begin_restore, "n_tokens"_a, "sequence"_a = 0,
             "Count tokens from position n_tokens on as not held, before a checkpoint of that length is restored.")
        .def("end_restore", &end_restore, "sequence"_a = 0, "Note that the checkpoint has been restored.")
        .def("n_cells", &n_cells, "sequence"_a = 0, "Number of tokens that the sequence holds.")
        .def(
            "cells",
            [](const Context & self, size_t sequence) {
                require_sequence(self, sequence);
                return self.cells(sequence);
            },
            "sequence"_a = 0, "The tokens that the sequence holds.")
        .def(
            "hold",
            [](Context & self, TokenRow tokens, size_t sequence) {
                require_sequence(self, sequence);
                self.hold(sequence, tokens.data(), tokens.shape(0));
            },
            "tokens"_a.noconvert(), "sequence"_a = 0,
            "Note that llama.cpp has filled an empty sequence with the cells of these tokens.")
        .def(
            "logits", [](const Context & self, int32_t i) { return reinterpret_cast<uintptr_t>(self.logits(i)); }, "i"_a,
            "Address of the logits of token i of the last batch; 0 if llama.cpp did not keep them.")
        .def("truncate", &drop_tail, "n_tokens"_a, "sequence"_a = 0,
             "Drop the tokens from position n_tokens on; returns False if a tail cannot be dropped.")
        .def_prop_rw("is_stopped", &Context::is_stopped, &Context::stop,
                     "From any thread: true ends the batch in progress (on CPUs) and later ones, with code 2.")
        .def_rw("has_images", &Context::has_images, "Whether texts may have images; at first, false.")
        .def_rw("uses_attention", &Context::uses_attention,
                "Whether batches use the attention kernels, where there is code for a model's attention; at first, false.")
        .def_prop_ro("has_own_attention", &Context::has_own_attention,
                     "Whether the kernels computed all attention of the last batch.")
        .def_prop_ro("decode_seconds", &Context::decode_seconds, "Wall time inside llama_decode so far.");
}

}  // namespace ggufspec::bindings
