// Fuzzes the C entry points under the address and undefined-behaviour sanitizers: random sizes, ks, temperatures, masks
// and bit patterns. The sanitizers catch most; a case also fails
// - if a row that can be satisfied does not sum to k, if one that cannot is not NaN, or if an entry leaves [0, 1];
// - if the sums at a point are not those of the values there;
// - if a statistical top-k is not what exceeds its threshold;
// - if a row with costs does not spend its budget, alone or in a group;
// - if logarithms or losses are not those of a row that sums to k;
// - if a sample is not 0s and 1s of the right number;
// - if a sample along a tree, Pareto's constants or the characteristic function of a count is not what it stands for;
// - if a pursuit takes an atom twice or makes the residual larger;
// - if attention drops more than its bound, or bounds more than it may;
// - if a call that gets no memory does not say so.
// Usage: fuzz [cases] [seed]
#include <cstdio>
#include <cstdlib>

#include "fuzz_draws.h"
#include "fuzz_rows.h"

int main(int argc, char** argv) {
  const long cases = argc > 1 ? std::atol(argv[1]) : 100000;
  Rng rng(argc > 2 ? (uint64_t)std::atoll(argv[2]) : 0);
  int failed = 0;
  for (long i = 0; i < cases && failed < 10; ++i) failed += i % 3 ? fuzz<float>(rng, i) : fuzz<double>(rng, i);
  for (long i = 0; i < cases && failed < 10; ++i) failed += fuzz_logs(rng, i);
  for (long i = 0; i < cases && failed < 10; ++i)
    failed += i % 3 ? fuzz_costs<float>(rng, i) : fuzz_costs<double>(rng, i);
  for (long i = 0; i < cases && failed < 10; ++i)
    failed += i % 2 ? fuzz_samples<float>(rng, i) : fuzz_samples<double>(rng, i);
  for (long i = 0; i < cases && failed < 10; ++i) failed += fuzz_laws(rng, i);
  for (long i = 0; i < cases && failed < 10; ++i)
    failed += i % 2 ? fuzz_pursuit<float>(rng, i) : fuzz_pursuit<double>(rng, i);
  for (long i = 0; i < cases && failed < 10; ++i)
    failed += i % 2 ? fuzz_attention<float>(rng, i) : fuzz_attention<double>(rng, i);
  std::printf("%ld cases, %d failed\n", cases, failed);
  return failed != 0;
}
