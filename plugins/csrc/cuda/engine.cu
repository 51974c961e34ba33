// Every kernel of the backend `cuda`, in one translation unit: our ops', and those that its engines are made of.
#include "kernels.cu"
#include "engine/kernels.cu"
