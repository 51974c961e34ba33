// One registration per op; each defines a class that is bound to its arrays once and then called with extents.
#pragma once

#include <nanobind/nanobind.h>

namespace outrider {

void register_bim_mask(nanobind::module_& module);
void register_sample(nanobind::module_& module);
void register_tree_accept(nanobind::module_& module);
void register_chain_accept(nanobind::module_& module);
void register_race_noise(nanobind::module_& module);
void register_kv_gather(nanobind::module_& module);
void register_block_summary(nanobind::module_& module);
void register_block_select(nanobind::module_& module);
void register_partial_kv_gather(nanobind::module_& module);
void register_choice_parts(nanobind::module_& module);
void register_ngrams(nanobind::module_& module);

}  // namespace outrider
