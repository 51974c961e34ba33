// Every kernel that engines of the backend `cuda` are made of.
#include "attention.cu.h"
#include "evaluate.cu.h"
#include "half_product.cu.h"
#include "product.cu.h"
#include "quant_product.cu.h"
#include "rms_norm.cu.h"
