// The kernel set of one instruction set.
#include "kernels.h"

namespace dist_rng::DIST_RNG_ISA {

#define DIST_RNG_TEXT(name) #name
#define DIST_RNG_NAME(name) DIST_RNG_TEXT(name)

const KernelSet kKernels = {DIST_RNG_NAME(DIST_RNG_ISA),
                            twist,
                            temper,
                            xor_windows,
                            uniform,
                            normal_blocks,
                            normal_pairs,
                            log_normal_pairs,
                            bernoulli,
                            bernoulli_tensor,
                            exponential,
                            cauchy,
                            geometric,
                            integers,
                            all_integers,
                            philox_calls,
                            philox_convert};

}  // namespace dist_rng::DIST_RNG_ISA
