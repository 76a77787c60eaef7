// What the Python bindings share: types of arguments, and checks of them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ggufspec::bindings {

namespace nb = nanobind;
using namespace nb::literals;

using ConstMatrix = nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstMasks = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using TokenRow = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = std::vector<int32_t>;
using Uniforms = std::vector<double>;
using Numbers = nb::typed<nb::dict, nb::str, nb::float_>;

// Raise ValueError.
void require(bool holds, const char * message);
void require_tokens(const int32_t * tokens, size_t n, size_t n_vocab);
void require_parents(const Tokens & parents, size_t n);

void bind_sampling(nb::module_ & m);
void bind_verify(nb::module_ & m);
void bind_length(nb::module_ & m);
void bind_context(nb::module_ & m);
void bind_ngrams(nb::module_ & m);

}  // namespace ggufspec::bindings
