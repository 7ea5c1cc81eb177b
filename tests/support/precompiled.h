// What most tests include of GoogleTest and the standard library, parsed once a target; see
// core/precompiled.h.
#include <gtest/gtest.h>
#include <iostream>
#include <set>
#include "core/precompiled.h"
