// Decodes batches and truncates sequences of a llama.cpp context, through the functions of the libllama
// that llama-cpp-python has loaded. llama.cpp is not linked, so one build works with its CPU, CUDA, Metal
// and Vulkan builds. Sequences are numbered from 0.
//
// The end of a batch may be a tree. llama.cpp masks by sequences: each leaf has one of its own, a node belongs to those
// of the leaves below it, and its position is that of its depth. The first leaf has the sequence's own id, the others
// have further ids ("branches"), which share the cells of the text before the tree.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

namespace ggufspec {

// struct llama_batch of llama.h, passed by value; Python compares it with llama-cpp-python's.
struct Batch {
    int32_t n_tokens;
    int32_t * token;
    float * embd;
    int32_t * pos;
    int32_t * n_seq_id;
    int32_t ** seq_id;
    int8_t * logits;
};

struct Functions {
    int32_t (*decode)(void *, Batch);                      // llama_decode
    void (*synchronize)(void *);                           // llama_synchronize
    float * (*get_logits_ith)(void *, int32_t);            // llama_get_logits_ith
    bool (*seq_rm)(void *, int32_t, int32_t, int32_t);     // llama_memory_seq_rm
    void (*seq_cp)(void *, int32_t, int32_t, int32_t, int32_t);  // llama_memory_seq_cp
    int32_t (*seq_pos_max)(void *, int32_t);               // llama_memory_seq_pos_max
    void (*set_abort_callback)(void *, bool (*)(void *), void *);  // llama_set_abort_callback
};

struct DecodeError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Context {
public:
    // n_leaves: the most leaves of a tree for each sequence; n_sequences * n_leaves ids of llama.cpp.
    // n_hidden: the width of the hidden states that each token of a batch has beside it, 0 without them. are_alone: a batch
    // has hidden states or tokens, not both; its tokens then only name what is held.
    // n_rollback: see ContextOptions in context_options.py; 0 where llama.cpp itself refuses what it cannot drop.
    // shares_cells: its memory is that of another context. A batch is then placed behind that one's cells, and
    // llama.cpp adds none: the tokens that this object holds are those of past batches.
    Context(Functions functions, void * context, void * memory, size_t n_batch, size_t n_sequences, size_t n_leaves,
            size_t n_hidden, bool are_alone, size_t n_rollback, bool shares_cells);
    Context(const Context &) = delete;  // a batch has pointers into this object
    Context & operator=(const Context &) = delete;

    // The length of the longest common prefix of the held tokens and `tokens`, at most n_most. Of a tree in the last
    // batch, the path along `tokens` counts.
    size_t n_common(size_t sequence, const int32_t * tokens, size_t n_most) const;

    // Truncates to the longest common prefix with `tokens`, of at most n_most tokens, and drops what a tree has beside
    // it. Returns how many remain, or -1 if this kind of memory cannot drop a tail: then a checkpoint must be restored.
    int32_t resume(size_t sequence, const int32_t * tokens, size_t n_most);

    // Drops the tokens from position n_tokens on, and of a tree all but the first path. False: this kind of memory cannot drop a tail.
    bool truncate(size_t sequence, size_t n_tokens);

    // Restoring a checkpoint of n_tokens: begin_restore, llama.cpp's function, end_restore if it succeeded.
    // Between them, the tokens from there on count as not held, and no tail can be dropped.
    void begin_restore(size_t sequence, size_t n_tokens);
    void end_restore(size_t sequence) { held_[sequence].n_droppable = 0; }

    // llama.cpp's function has given the sequence, which held nothing, the cells of these tokens. None can be dropped from a
    // recurrent state until the next batch.
    void hold(size_t sequence, const int32_t * tokens, size_t n_tokens);

    // Makes a sequence hold what another has of the beginning of `tokens`, and nothing else. They share cells.
    void copy_prefix(size_t source, size_t sequence, const int32_t * tokens, size_t n_tokens);

    // Drops n_dropped of the tokens that a sequence holds, from the one behind its first n_first on, and not its last. Those
    // behind them keep their positions, and count as following the first ones. Not with trees; n_first is the same in each
    // call, until the sequence is truncated to it. Throws std::invalid_argument.
    void drop_middle(size_t sequence, size_t n_first, size_t n_dropped);

    // A batch: begin, then add once for each of its sequences, then run. Evaluates the tokens after
    // those that are held, and keeps logits of the last n_rows of each part. At most n_batch tokens. `hidden`:
    // (n_tokens, n_hidden), copied; null for zeros. `parents`: the last n_nodes tokens are a tree, in which a node
    // follows an earlier one, or -1: the token before them. It has at most n_leaves leaves, and is held until the next
    // call for this sequence that changes what it holds.
    // run returns llama_decode's code, or throws what it threw as a DecodeError; unless the code is 0, none of the tokens is
    // held. On CPU backends, a batch that takes long calls is_interrupted, in this thread and ten times a second, and ends
    // if it is true.
    void begin();
    void add(size_t sequence, const int32_t * tokens, size_t n_tokens, size_t n_rows, const float * hidden = nullptr,
             const int32_t * parents = nullptr, size_t n_nodes = 0);
    int32_t run(std::function<bool()> is_interrupted);

    // The logits of token i of the last batch; null if llama.cpp keeps none of it.
    const float * logits(int32_t i) const;

    // Wall time inside llama_decode so far.
    double decode_seconds() const { return seconds_; }
    size_t n_batch() const { return tokens_.size(); }
    size_t n_sequences() const { return held_.size(); }
    size_t n_leaves() const { return n_leaves_; }
    size_t n_hidden() const { return n_hidden_; }
    size_t n_cells(size_t sequence) const { return held_[sequence].cells.size(); }
    const std::vector<int32_t> & cells(size_t sequence) const { return held_[sequence].cells; }

private:
    struct Branch {
        int32_t id;
        size_t n_shared = 0;   // it holds so many of the first cells of its sequence
        bool is_clean = true;  // false: llama.cpp may hold more
    };
    // Behind the first n_before cells: the first path is in the cells, too.
    struct Tree {
        size_t n_before = 0;
        std::vector<int32_t> tokens, parents;
        std::vector<int32_t> branches;  // of the first leaf below each node; -1: the sequence's own id
        std::vector<int32_t> ends;      // the leaf of each branch
        bool is_there() const { return !ends.empty(); }  // a chain is only cells
        // The nodes along the first n_most of `tokens`, if the text begins with the cells before the tree.
        std::vector<int32_t> path(const std::vector<int32_t> & cells, const int32_t * tokens, size_t n_most) const;
    };
    struct Held {
        int32_t id;
        std::vector<int32_t> cells;  // the tokens that the sequence holds; llama.cpp may hold more of them
        std::vector<Branch> branches;
        Tree tree;
        std::vector<int32_t> ids;    // of the tree in the batch in progress: of all its leaves, then of each node
        bool is_clean = true;        // false: llama.cpp may hold more, after a failure or a refused truncation
        size_t n_first = 0, n_gap = 0;  // positions without cells: n_gap of them behind the first n_first
        int32_t n_droppable = 0;     // with n_rollback: tokens whose states are kept; -1: the state is not that of cells
    };
    // The position of cell i, which may be the next one.
    static int32_t position(const Held & held, size_t i) { return static_cast<int32_t>(i < held.n_first ? i : i + held.n_gap); }
    struct Part {
        Held * held;
        size_t n_tokens;
    };

    // Leave the branches of a sequence what they share with it, and no more than its first n_tokens cells.
    void cut_branches(Held & held, size_t n_tokens);
    // Of a tree, make the path along `tokens` the cells, and give the branches what they share with it.
    void choose_path(Held & held, const int32_t * tokens, size_t n_most);
    // Sequences and positions of n_nodes at the end of the batch, which are a tree behind n_lead tokens.
    void add_tree(Held & held, size_t n_lead, const int32_t * parents, size_t n_nodes);

    static bool aborts(void * self);

    using Clock = std::chrono::steady_clock;

    Functions functions_;
    void * context_;
    void * memory_;
    size_t n_leaves_;
    size_t n_rollback_;
    bool shares_cells_;
    std::vector<Held> held_;
    std::vector<Part> parts_;
    size_t n_added_ = 0;
    std::vector<int32_t> tokens_, positions_, n_sequences_;
    std::vector<int32_t *> sequences_;
    std::vector<int8_t> wanted_;
    size_t n_hidden_;
    bool are_alone_, has_hidden_ = false;  // has_hidden_: the batch in progress, if they are alone
    std::vector<float> hidden_;
    double seconds_ = 0;
    std::function<bool()> is_interrupted_;  // of the batch in progress; may be empty
    Clock::time_point next_check_;
    size_t n_nodes_ = 0;  // computed so far
};

// Runs the batches of two contexts at the same time, the second one in a thread of its own. Returns both codes;
// is_interrupted, called in this thread, ends both, as far as they are computed on CPU backends.
std::pair<int32_t, int32_t> run_beside(Context & first, Context & second, const std::function<bool()> & is_interrupted);

}  // namespace ggufspec
