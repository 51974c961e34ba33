#include <nanobind/nanobind.h>

#include "ops.h"

NB_MODULE(_native, module) {
  module.doc() = "CPU kernels of the ops. Use plugins.native.";
  outrider::register_bim_mask(module);
  outrider::register_sample(module);
  outrider::register_tree_accept(module);
  outrider::register_chain_accept(module);
  outrider::register_race_noise(module);
  outrider::register_kv_gather(module);
  outrider::register_block_summary(module);
  outrider::register_block_select(module);
  outrider::register_partial_kv_gather(module);
  outrider::register_choice_parts(module);
  outrider::register_ngrams(module);
}
