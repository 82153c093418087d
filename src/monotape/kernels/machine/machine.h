// The machine that the kernel runs on. Sources include this header; the machine's own header holds every instruction,
// built-in and fact of the hardware that they use, so another machine is another header beside hopper.h. It includes
// plan.h first: how products are made depends on the formats of the plan.
#pragma once
#ifndef MONOTAPE_MACHINE
#define MONOTAPE_MACHINE "machine/hopper.h"
#endif
#include MONOTAPE_MACHINE
