#include "device.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace fake {

namespace {

constexpr unsigned kMostThreads = 32;  // of a block that may have any number: fibers are slow

using Emulate = int (*)(const char*, long long, long long, long long, void**, unsigned);
using Number = int (*)(const char*);

void* symbol(const char* name) {
  static void* library = dlopen(std::getenv("OUTRIDER_EMULATOR"), RTLD_NOW);
  void* found = library == nullptr ? nullptr : dlsym(library, name);
  if (found == nullptr) {
    fault(std::string("the emulator cannot be loaded: ") + dlerror());
    std::abort();
  }
  return found;
}

int parameters_of(const char* kernel) {
  static const auto parameters = reinterpret_cast<Number>(symbol("parameters"));
  return parameters(kernel);
}

}  // namespace

bool has_kernel(const char* kernel) { return parameters_of(kernel) >= 0; }

void launch_kernel(const char* kernel, unsigned blocks, unsigned threads, unsigned shared, void** parameters,
                   Stream* stream) {
  static const auto emulate = reinterpret_cast<Emulate>(symbol("emulate"));
  static const auto any_threads = reinterpret_cast<Number>(symbol("any_threads"));
  if (any_threads(kernel)) threads = std::min(threads, kMostThreads);
  std::vector<uint64_t> values;
  for (int i = 0; i < parameters_of(kernel); ++i) values.push_back(*static_cast<uint64_t*>(parameters[i]));
  const std::string name = kernel;
  record("kernel", name);
  enqueue(stream, name, [=]() mutable {
    static unsigned seed = 0;
    std::vector<void*> pointers;
    for (uint64_t& value : values) pointers.push_back(&value);
    const int code = emulate(name.c_str(), blocks, threads, shared, pointers.data(), ++seed);
    if (code != 0) fault(name + " cannot be emulated: " + std::to_string(code));
  });
}

}  // namespace fake
