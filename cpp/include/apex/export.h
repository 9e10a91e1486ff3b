#pragma once

/// Symbol visibility. The library is built with hidden visibility; what is public carries APEX_API.

#if defined(APEX_STATIC_DEFINE) || !defined(__GNUC__)
#define APEX_API
#else
#define APEX_API __attribute__((visibility("default")))
#endif
