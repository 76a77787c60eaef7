// Python bindings of the kernels.
#include "bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "../attention/backend.h"
#include "backend.h"
#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ggufspec::matmul {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

const Instructions & instructions_of(const std::string & name) {
    const Instructions * found = find_instructions(name.c_str());
    if (found == nullptr) throw nb::value_error(("no kernels for " + name + " on this processor").c_str());
    return *found;
}

std::vector<std::string> names() {
    std::vector<std::string> found;
    for (const Instructions * each : supported_instructions()) found.emplace_back(each->name);
    return found;
}

std::map<std::string, int> types(const std::string & name) {
    const Instructions & instructions = instructions_of(name);
    std::map<std::string, int> found;
    for (size_t i = 0; i < instructions.n_kernels; i++) found[instructions.kernels[i].name] = instructions.kernels[i].type;
    return found;
}

Floats product(const std::string & name, int type, Bytes weights, Floats rows) {
    const Instructions & instructions = instructions_of(name);
    const Kernel * kernel = find_kernel(instructions, type);
    const size_t n = rows.shape(0), n_columns = rows.shape(1);
    if (kernel == nullptr || n_columns == 0 || n_columns % kernel->n_values)
        throw nb::value_error("no kernel for this type and width");
    const int64_t n_super = n_columns / kernel->n_values, n_rows = weights.shape(0) / (n_super * kernel->file_bytes);
    if (n_rows * n_super * kernel->file_bytes != weights.shape(0)) throw nb::value_error("the weights are no whole rows");
    const int64_t groups = (n_rows + instructions.width - 1) / instructions.width;
    std::vector<uint8_t> packed(groups * n_super * kernel->packed_bytes);
    kernel->pack(packed.data(), weights.data(), n_super, n_rows, 0, groups);
    const size_t row_bytes = n_super * kernel->active_bytes;
    std::vector<char> converted(n * row_bytes);
    auto * out = new float[std::max<size_t>(n * n_rows, 1)];
    nb::capsule owner(out, [](void * p) noexcept { delete[] static_cast<float *>(p); });
    for (size_t begin = 0; begin < n; begin += instructions.most) {
        const size_t end = std::min(n, begin + instructions.most);
        std::vector<const void *> in;
        std::vector<float *> results;
        for (size_t i = begin; i < end; i++) {
            kernel->convert(converted.data() + i * row_bytes, rows.data() + i * n_columns, 0, n_columns / kBlock);
            in.push_back(converted.data() + i * row_bytes);
            results.push_back(out + i * n_rows);
        }
        kernel->multiply(int(end - begin), packed.data(), in.data(), results.data(), n_super, n_rows, 0, groups);
    }
    return Floats(out, {n, size_t(n_rows)}, owner);
}

template <class F>
void take(const std::map<std::string, uintptr_t> & addresses, const char * name, F *& to) {
    const auto found = addresses.find(name);
    if (found == addresses.end() || found->second == 0) throw nb::value_error(("no address of " + std::string(name)).c_str());
    to = reinterpret_cast<F *>(found->second);
}

void register_kernels(const std::string & name, const std::map<std::string, uintptr_t> & addresses) {
    ggml::Functions functions{};
    take(addresses, "ggml_backend_cpu_get_extra_buffer_types", functions.ggml_backend_cpu_get_extra_buffer_types);
    take(addresses, "ggml_barrier", functions.ggml_barrier);
    take(addresses, "ggml_threadpool_chunk_set", functions.ggml_threadpool_chunk_set);
    take(addresses, "ggml_threadpool_chunk_add", functions.ggml_threadpool_chunk_add);
    take(addresses, "ggml_backend_cpu_buffer_type", functions.ggml_backend_cpu_buffer_type);
    take(addresses, "ggml_backend_buft_alloc_buffer", functions.ggml_backend_buft_alloc_buffer);
    take(addresses, "ggml_backend_buft_is_host", functions.ggml_backend_buft_is_host);
    register_buffer_type(functions, instructions_of(name));
}

std::map<std::string, size_t> layout() {
    using ggml::Buffer, ggml::BufferType, ggml::Tensor;
    return {
        {"tensor", sizeof(Tensor)},
        {"tensor.type", offsetof(Tensor, type)},
        {"tensor.buffer", offsetof(Tensor, buffer)},
        {"tensor.ne", offsetof(Tensor, ne)},
        {"tensor.nb", offsetof(Tensor, nb)},
        {"tensor.op", offsetof(Tensor, op)},
        {"tensor.op_params", offsetof(Tensor, op_params)},
        {"tensor.flags", offsetof(Tensor, flags)},
        {"tensor.src", offsetof(Tensor, src)},
        {"tensor.view_src", offsetof(Tensor, view_src)},
        {"tensor.view_offs", offsetof(Tensor, view_offs)},
        {"tensor.data", offsetof(Tensor, data)},
        {"tensor.name", offsetof(Tensor, name)},
        {"buffer.type", offsetof(Buffer, type)},
        {"buffer.size", offsetof(Buffer, size)},
        {"buffer.usage", offsetof(Buffer, usage)},
        {"buffer_type.device", offsetof(BufferType, device)},
        {"MUL_MAT", ggml::kMulMat},
        {"MUL_MAT_ID", ggml::kMulMatId},
        {"FLASH_ATTN_EXT", ggml::kFlashAttnExt},
        {"f32", ggml::kF32},
        {"f16", ggml::kF16},
        {"q8_0", ggml::kQ8_0},
        {"bf16", ggml::kBF16},
    };
}

}  // namespace

void bind(nb::module_ & m) {
    m.def("kernel_instructions", &names,
          "The instruction sets of this processor for which there are kernels, the fastest first.");
    m.def("kernel_types", &types, "instructions"_a,
          "The types of weights with kernels for an instruction set: ggml's names and numbers.");
    m.def("ggml_layout", &layout,
          "What the kernels know of ggml: sizes and offsets of its structures, and numbers of its operations and types.");
    m.def("kernel_product", &product, "instructions"_a, "type"_a, "weights"_a, "rows"_a,
          "The product (n, n_rows) of rows of activations (n, n_columns) and weights, whole rows in ggml's layout. For tests.");
    m.def("register_kernels", &register_kernels, "instructions"_a, "addresses"_a,
          "Offer the kernels to ggml's CPU backend, once per process, before it is asked for its buffer types.");
    m.def("offer_kernels", &offer, "types"_a, "both"_a = false,
          "Set the types of weights (enum ggml_type) for which models that this thread loads from now on use the kernels.\n"
          "both: the file's weights are kept in addition to the packed ones, so that devices can read them for prompts.");
    m.def("use_attention", &attention::use, "whether"_a,
          "Set whether passes that this thread begins from now on use the attention kernels, as far as there is code for a "
          "model's attention; returns what it was before.");
}

}  // namespace ggufspec::matmul
