/* A storage that fails, for everything below STORAGE_ROOT while the file STORAGE_SWITCH is there.
 *
 * Loaded with LD_PRELOAD. In one half second of six, as STORAGE_SEED has it, every third call fails, otherwise one of
 * three hundred: opening, looking and reading with ESTALE or EIO, writing with ENOSPC, EROFS or EIO. Reads and writes
 * may be short, listings lack entries, and some calls take two seconds. A seed fixes the bad half seconds, not the calls.
 * While the file STORAGE_READ_ONLY is there, nothing can be written, and all else works.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define DESCRIPTORS 65536
#define NEXT(name) static __typeof__(name) *next; if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
enum kind { READING, WRITING };
enum { SHORT = -1 }; /* of a read or write */

static char below[DESCRIPTORS];
static atomic_ullong calls;

static unsigned long long mixed(unsigned long long x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

static int is_below(int folder, const char *path) {
    const char *root = getenv("STORAGE_ROOT");
    size_t length = root ? strlen(root) : 0;
    if (!length || !path)
        return 0;
    if (path[0] != '/')
        return folder >= 0 && folder < DESCRIPTORS && below[folder];
    return !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

/* 0, an error, or SHORT. */
static int fault(enum kind kind) {
    static const int reading[] = {ESTALE, EIO}, writing[] = {ENOSPC, EROFS, EIO, ENOSPC};
    const char *on = getenv("STORAGE_SWITCH"), *seed = getenv("STORAGE_SEED"), *closed = getenv("STORAGE_READ_ONLY");
    if (closed && !syscall(SYS_faccessat, AT_FDCWD, closed, F_OK))
        return kind == WRITING ? EROFS : 0;
    if (!on || syscall(SYS_faccessat, AT_FDCWD, on, F_OK))
        return 0;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned long long half = now.tv_sec * 2ULL + now.tv_nsec / 500000000;
    unsigned long long base = seed ? strtoull(seed, NULL, 10) : 0;
    int is_bad = mixed(base * 1000003 + half) % 6 == 0;
    unsigned long long chance = mixed(mixed(base ^ half) ^ ((unsigned long long)getpid() << 32) ^ atomic_fetch_add(&calls, 1));
    if (chance % 300 >= (is_bad ? 100 : 1))
        return 0;
    chance = mixed(chance);
    if (chance % 64 == 0) {
        struct timespec pause = {2, 0};
        nanosleep(&pause, NULL);
        return 0;
    }
    chance /= 64;
    if (chance % 8 == 0)
        return SHORT;
    chance /= 8;
    return kind == WRITING ? writing[chance % 4] : reading[chance % 2];
}

#define REFUSE(at, path, kind, answer) do { \
    int error = is_below(at, path) ? fault(kind) : 0; \
    if (error > 0) { errno = error; return answer; } \
} while (0)

#define OPENING(name, arguments, at, path, ...) \
    int name arguments { \
        NEXT(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
        REFUSE(at, path, flags & (O_WRONLY | O_RDWR | O_CREAT) ? WRITING : READING, -1); \
        int opened = next(__VA_ARGS__, flags, mode); \
        if (opened >= 0 && opened < DESCRIPTORS) below[opened] = is_below(at, path); \
        return opened; \
    }
OPENING(open, (const char *path, int flags, ...), AT_FDCWD, path, path)
OPENING(open64, (const char *path, int flags, ...), AT_FDCWD, path, path)
OPENING(openat, (int folder, const char *path, int flags, ...), folder, path, folder, path)
OPENING(openat64, (int folder, const char *path, int flags, ...), folder, path, folder, path)

int close(int file) {
    NEXT(close);
    if (file >= 0 && file < DESCRIPTORS) below[file] = 0;
    return next(file);
}

#define LOOKING(name, parameters, at, path, ...) \
    extern int name parameters; \
    int name parameters { NEXT(name); REFUSE(at, path, READING, -1); return next(__VA_ARGS__); }
LOOKING(stat, (const char *path, struct stat *to), AT_FDCWD, path, path, to)
LOOKING(stat64, (const char *path, struct stat64 *to), AT_FDCWD, path, path, to)
LOOKING(lstat, (const char *path, struct stat *to), AT_FDCWD, path, path, to)
LOOKING(lstat64, (const char *path, struct stat64 *to), AT_FDCWD, path, path, to)
LOOKING(fstatat, (int folder, const char *path, struct stat *to, int flags), folder, path, folder, path, to, flags)
LOOKING(fstatat64, (int folder, const char *path, struct stat64 *to, int flags), folder, path, folder, path, to, flags)
LOOKING(__xstat, (int version, const char *path, struct stat *to), AT_FDCWD, path, version, path, to)
LOOKING(__xstat64, (int version, const char *path, struct stat64 *to), AT_FDCWD, path, version, path, to)
LOOKING(__lxstat, (int version, const char *path, struct stat *to), AT_FDCWD, path, version, path, to)
LOOKING(__lxstat64, (int version, const char *path, struct stat64 *to), AT_FDCWD, path, version, path, to)

#define CHANGING(name, parameters, at, path, ...) \
    int name parameters { NEXT(name); REFUSE(at, path, WRITING, -1); return next(__VA_ARGS__); }
CHANGING(rename, (const char *from, const char *to), AT_FDCWD, to, from, to)
CHANGING(mkdir, (const char *path, mode_t mode), AT_FDCWD, path, path, mode)
CHANGING(link, (const char *from, const char *to), AT_FDCWD, to, from, to)
CHANGING(unlink, (const char *path), AT_FDCWD, path, path)

#define MOVING(name, parameters, kind, ...) \
    ssize_t name parameters { \
        NEXT(name); \
        int error = file >= 0 && file < DESCRIPTORS && below[file] ? fault(kind) : 0; \
        if (error > 0) { errno = error; return -1; } \
        if (error == SHORT) length = length / 2 + 1; \
        return next(__VA_ARGS__); \
    }
MOVING(read, (int file, void *data, size_t length), READING, file, data, length)
MOVING(write, (int file, const void *data, size_t length), WRITING, file, data, length)

int fsync(int file) {
    NEXT(fsync);
    int error = file >= 0 && file < DESCRIPTORS && below[file] ? fault(WRITING) : 0;
    if (error > 0) { errno = error; return -1; }
    return next(file);
}

DIR *opendir(const char *path) {
    NEXT(opendir);
    REFUSE(AT_FDCWD, path, READING, NULL);
    DIR *opened = next(path);
    if (opened && dirfd(opened) < DESCRIPTORS) below[dirfd(opened)] = is_below(AT_FDCWD, path);
    return opened;
}

/* An entry that is not there yet, as in a listing that was kept. */
#define LISTING(name, entry) \
    struct entry *name(DIR *folder) { \
        NEXT(name); \
        struct entry *found = next(folder); \
        int file = dirfd(folder); \
        while (found && file >= 0 && file < DESCRIPTORS && below[file] && fault(READING) > 0) found = next(folder); \
        return found; \
    }
LISTING(readdir, dirent)
LISTING(readdir64, dirent64)
