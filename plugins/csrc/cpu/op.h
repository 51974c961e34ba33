// An op of Python: bound to its arrays once, then called with the extents of each step.
//
// A kernel is a class that declares itself, wherever it stands:
//
//   class Sample {
//    public:
//     static constexpr const char* kOp = "Sample";
//     explicit Sample(const Binding& bound);
//     void call(i64 new_tokens, i64 count);  // the extents of its schema, in order
//   };
//   const Registration registered(define_op<Sample>);
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>

#include "../portable.h"
#include "refuse.h"

namespace outrider {

// An op's arrays by name, and its sizes by symbol, as its schema has them: plugins/native.py has checked them.
//
// Arrays are read through NumPy's own attributes, not the buffer protocol or DLPack: bfloat16 (ml_dtypes) has neither.
class Binding {
 public:
  Binding(const char* op, nanobind::dict arrays, nanobind::dict sizes) : op_(op), arrays_(arrays), sizes_(sizes) {}

  const char* op() const { return op_; }

  // T is the type of the array's elements, or char for data that the kernel moves, whatever it is.
  template <typename T>
  const T* input(const char* name) const {
    return output<T>(name);
  }
  template <typename T>
  T* output(const char* name) const {
    constexpr char kKind = std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
    const nanobind::object array = arrays_[name];
    const char kind = nanobind::cast<char>(array.attr("dtype").attr("kind"));
    if (!std::is_same_v<T, char> && (kind != kKind || item_size(name) != static_cast<i64>(sizeof(T)))) {
      refuse(op_, "the kernel takes '" + std::string(name) + "' for another type than its schema's, " + dtype(name) +
                      ".");
    }
    return reinterpret_cast<T*>(nanobind::cast<std::uintptr_t>(array.attr("ctypes").attr("data")));
  }
  // Of an array, as NumPy spells it.
  std::string dtype(const char* name) const { return nanobind::str(arrays_[name].attr("dtype").attr("name")).c_str(); }
  i64 item_size(const char* name) const { return nanobind::cast<i64>(arrays_[name].attr("itemsize")); }
  // Of a symbol, or the value of an attribute.
  i64 size(const char* symbol) const { return nanobind::cast<i64>(sizes_[symbol]); }

 private:
  const char* op_;
  nanobind::dict arrays_;
  nanobind::dict sizes_;
};

template <typename Kernel, typename... Extents>
class BoundOp {
 public:
  BoundOp(nanobind::dict arrays, nanobind::dict sizes, nanobind::list extents)
      : arrays_(arrays), kernel_(Binding(Kernel::kOp, arrays, sizes)) {
    if (extents.size() != sizeof...(Extents)) {
      refuse(Kernel::kOp, "the kernel takes " + std::to_string(sizeof...(Extents)) + " extents, its schema has " +
                              std::to_string(extents.size()) + ".");
    }
    for (size_t i = 0; i < extents.size(); ++i) {
      extents_[i] = nanobind::str(extents[i]).c_str();
      capacities_[i] = nanobind::cast<i64>(sizes[extents[i]]);
    }
  }

  void call(Extents... extents) {
    [[maybe_unused]] size_t i = 0;
    (check(i++, extents), ...);
    kernel_.call(extents...);
  }

 private:
  void check(size_t i, i64 extent) const {
    if (extent < 0 || extent > capacities_[i]) {
      refuse(Kernel::kOp, "extent " + extents_[i] + " is " + std::to_string(extent) +
                              ", but the bound buffers hold 0 to " + std::to_string(capacities_[i]) + ".");
    }
  }

  nanobind::dict arrays_;  // kept alive
  Kernel kernel_;
  std::array<std::string, sizeof...(Extents)> extents_;
  std::array<i64, sizeof...(Extents)> capacities_;
};

template <typename Kernel, typename... Extents>
void define_op(nanobind::module_& module, void (Kernel::*)(Extents...)) {
  using Op = BoundOp<Kernel, Extents...>;
  nanobind::class_<Op>(module, Kernel::kOp)
      .def(nanobind::init<nanobind::dict, nanobind::dict, nanobind::list>())
      .def("__call__", &Op::call);
}

template <typename Kernel>
void define_op(nanobind::module_& module) {
  define_op(module, &Kernel::call);
}

// A part of the Python module. Each source file registers its own; module.cc defines them all.
class Registration {
 public:
  explicit Registration(void (*define)(nanobind::module_&)) : define_(define), next_(first_) { first_ = this; }

  static void define_all(nanobind::module_& module) {
    for (const Registration* each = first_; each != nullptr; each = each->next_) each->define_(module);
  }

 private:
  void (*define_)(nanobind::module_&);
  const Registration* next_;
  static inline const Registration* first_ = nullptr;
};

}  // namespace outrider
