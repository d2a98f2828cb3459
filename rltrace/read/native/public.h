/* What Python calls: the only functions of the library that others see. */

#ifndef PUBLIC_H
#define PUBLIC_H

#if defined(__GNUC__)
#define PUBLIC __attribute__((visibility("default")))
#else
#define PUBLIC
#endif

#endif
