#pragma once

#include <nanobind/nanobind.h>

namespace ggufspec::matmul {

void bind(nanobind::module_ & m);

}  // namespace ggufspec::matmul
