#include "op.h"

NB_MODULE(_native, module) {
  module.doc() = "CPU kernels of the ops. Use plugins.native.";
  outrider::Registration::define_all(module);
}
