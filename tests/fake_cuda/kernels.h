// Our ops' kernels: those of the emulator's library, which OUTRIDER_EMULATOR names.
#pragma once

#include "device.h"

namespace fake {

// Enqueue `kernel`. As a driver does, it copies the parameters, of eight bytes each.
void launch_kernel(const char* kernel, unsigned blocks, unsigned threads, unsigned shared, void** parameters,
                   Stream* stream);
bool has_kernel(const char* kernel);

}  // namespace fake
