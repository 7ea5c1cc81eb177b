// What most tests include, parsed once a target; see core/precompiled.h.
#include <gtest/gtest.h>
#include <cmath>
#include <iostream>
#include <set>
#include "core/precompiled.h"
