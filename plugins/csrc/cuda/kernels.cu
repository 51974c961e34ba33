// Every kernel, in one translation unit: what is compiled ahead of time for an architecture.
#include "accept.cu.h"
#include "bim_mask.cu.h"
#include "draft_sample.cu.h"
#include "draws.cu.h"
#include "kv_gather.cu.h"
#include "tree_expand.cu.h"
#include "tree_rerank.cu.h"
