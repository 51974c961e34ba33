#include "binder.h"

#include <algorithm>
#include <cstdint>

namespace outrider {

namespace nb = nanobind;

namespace {

std::string text(nb::handle object) { return nb::str(object).c_str(); }

bool flag(nb::handle array, const char* name) { return nb::cast<bool>(array.attr("flags").attr(name)); }

std::vector<i64> shape_of(nb::handle array) {
  std::vector<i64> shape;
  for (nb::handle size : array.attr("shape")) shape.push_back(nb::cast<i64>(size));
  return shape;
}

std::string show(const std::vector<i64>& shape) {
  std::string shown = "[";
  for (size_t i = 0; i < shape.size(); ++i) shown += (i ? ", " : "") + std::to_string(shape[i]);
  return shown + "]";
}

}  // namespace

i64* Binder::find(const char* symbol) {
  const auto known = std::find_if(symbols_.begin(), symbols_.end(), [&](const auto& s) { return s.first == symbol; });
  return known == symbols_.end() ? nullptr : &known->second;
}

i64 Binder::size_of(const char* symbol) const {
  const i64* size = const_cast<Binder*>(this)->find(symbol);
  return size ? *size : 0;
}

const i64* Binder::row_splits(nb::handle array) {
  symbols_.emplace_back("E", size_of("R") + 1);
  return input<i64>("row_splits", array, {"E"});
}

std::string Binder::expected(std::initializer_list<const char*> dtypes, std::initializer_list<Dim> shape) const {
  std::string shown;
  for (const char* dtype : dtypes) shown += (shown.empty() ? "" : " or ") + std::string(dtype);
  shown += " [";
  bool first = true;
  for (const Dim& dim : shape) {
    if (!first) shown += ", ";
    first = false;
    if (!dim.symbol) {
      shown += std::to_string(dim.size);
      continue;
    }
    shown += dim.symbol;
    if (const i64* size = const_cast<Binder*>(this)->find(dim.symbol)) shown += "=" + std::to_string(*size);
  }
  return shown + "]";
}

void* Binder::bind(const char* name, nb::handle array, std::initializer_list<const char*> dtypes,
                   std::initializer_list<Dim> shape, bool written) {
  const std::string wanted = std::string(op_) + ": tensor '" + name + "' must be a C-contiguous NumPy array " +
                             expected(dtypes, shape) + "; found ";
  if (!nb::isinstance(array, nb::module_::import_("numpy").attr("ndarray"))) {
    throw nb::type_error((wanted + "a " + text(array.type().attr("__name__")) + ".").c_str());
  }
  const std::string dtype = text(array.attr("dtype").attr("name"));
  const std::vector<i64> found = shape_of(array);
  const std::string found_text = dtype + " " + show(found);
  const bool known_dtype =
      std::any_of(dtypes.begin(), dtypes.end(), [&](const char* allowed) { return dtype == allowed; });
  if (!known_dtype) throw nb::type_error((wanted + found_text + ".").c_str());
  if (!nb::cast<bool>(array.attr("dtype").attr("isnative"))) {
    throw nb::type_error((wanted + found_text + " in the other byte order.").c_str());
  }

  bool fits = found.size() == shape.size();
  size_t axis = 0;
  for (const Dim& dim : shape) {
    if (!fits) break;
    const i64 size = found[axis++];
    if (!dim.symbol) {
      fits = size == dim.size;
    } else if (const i64* known = find(dim.symbol)) {
      fits = size == *known;
    }
  }
  if (!fits) throw nb::value_error((wanted + found_text + ".").c_str());
  if (!flag(array, "c_contiguous") || !flag(array, "aligned")) {
    throw nb::value_error((wanted + found_text + " with gaps between its elements or out of alignment.").c_str());
  }
  if (written && !flag(array, "writeable")) {
    throw nb::value_error((wanted + found_text + " that is read-only, and the op writes it.").c_str());
  }

  axis = 0;
  for (const Dim& dim : shape) {
    const i64 size = found[axis++];
    if (dim.symbol && !find(dim.symbol)) symbols_.emplace_back(dim.symbol, size);
  }
  item_size_ = nb::cast<i64>(array.attr("itemsize"));
  dtype_ = dtype;
  arrays_.push_back(nb::borrow(array));
  return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(array.attr("ctypes").attr("data")));
}

}  // namespace outrider
