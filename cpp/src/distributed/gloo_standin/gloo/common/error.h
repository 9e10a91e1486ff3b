// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Stand-in, see gloo.cpp. Nothing of this header is used.
