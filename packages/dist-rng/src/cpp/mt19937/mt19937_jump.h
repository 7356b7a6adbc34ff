// Advances MT19937 by many blocks, with arithmetic on polynomials over GF(2).
//
// Every bit of the word sequence x(k) obeys the recurrence whose characteristic polynomial is
// phi, of degree 19937: if t^n = sum of c(i) t^i modulo phi, then x(k + n) = xor of the x(k + i)
// with c(i) = 1. Source: Haramoto, Matsumoto, Nishimura, Panneton, L'Ecuyer, "Efficient jump
// ahead for F2-linear random number generators" (2008), section 3; phi itself from Matsumoto and
// Nishimura, "Mersenne Twister" (1998), appendix A.
#pragma once

#include <cstdint>

namespace dist_rng {

// Replaces a block by the one `blocks` twists later. The block must come from a twist.
void jump_blocks(std::uint32_t* block, std::int64_t blocks);

// Whether a jump is cheaper than as many twists. From about 2e7 words on it always is; from
// 2.5e6 on it is for a distance that was asked for before, whose polynomial is then cached.
bool jump_pays(std::int64_t blocks);

}  // namespace dist_rng
