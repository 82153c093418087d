// The L2s of a GPU of several dies, which are not coherent: every die sees the GPU's memory through a copy of its own.
//
// An ordinary access reads and writes the die's copy. What it writes stays there until the die releases (writes its L2
// back), or until a line happens to be written back. What others have written is not seen before the die acquires (drops
// what its L2 has), or before a line happens to be fetched again. Accesses with the scope of the GPU pass the copies by:
// they go to `past_cache(p)`.
//
// A page of a copy is read-only until a fiber writes it; the fault keeps the page as it was before. So the bytes that a die
// has written are those that differ from that, and nothing else is ever written back.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace host {

struct Region {  // host_kernel.py: RegionStruct
  uint64_t start, bytes;
};

class Dies {
 public:
  static constexpr size_t kPage = 4096, kLine = 128;

  Dies(int count, const Region* regions, int regions_count) {
    uint64_t low = ~0ull, high = 0;
    size_t pages = 0;
    for (int i = 0; i < regions_count; i++) {
      const uint64_t first = regions[i].start / kPage * kPage, end = (regions[i].start + regions[i].bytes + kPage - 1) / kPage * kPage;
      places_.push_back({first, end, pages});
      pages += (end - first) / kPage;
      low = std::min(low, first), high = std::max(high, end);
    }
    std::sort(places_.begin(), places_.end(), [](const Place& a, const Place& b) { return a.first < b.first; });
    // A page before and one after: what lies past the highest memory is no other mapping of this process.
    low_ = low - kPage, span_ = high - low + 2 * kPage, versions_.assign(pages, 0);
    for (int i = 0; i < count; i++) dies_.push_back(std::make_unique<Die>(*this, pages));
  }

  int count() const { return static_cast<int>(dies_.size()); }

  // The address at which a die sees what lies at `at`; memory that is no GPU's is the same for all.
  uint64_t seen_by(int die, uint64_t at) const { return place_of(at) ? at - low_ + dies_[die]->view : at; }
  // Where all dies see what the current one sees at `p`.
  template <class T>
  T* past_cache(T* p) const {
    const uint64_t at = reinterpret_cast<uint64_t>(p), view = dies_[current]->view;
    return at - view < span_ ? reinterpret_cast<T*>(at - view + low_) : p;
  }
  int current = 0;  // the die of the fiber that runs

  // An access with the scope of the GPU, or a die, has changed memory.
  void changed(const void* at) {
    const Place* place = place_of(reinterpret_cast<uint64_t>(at));
    if (place) versions_[place->page_of(reinterpret_cast<uint64_t>(at))] = ++clock_;
  }

  void release() { release(*dies_[current]); }
  void release_all() {
    for (auto& die : dies_) release(*die);
  }
  void acquire() {
    Die& die = *dies_[current];
    if (die.acquired == clock_) return;
    die.acquired = clock_;
    for (const Place& place : places_)
      for (size_t page = place.page; page < place.page + (place.end - place.first) / kPage; page++)
        if (versions_[page] > die.seen[page]) {
          die.seen[page] = clock_;
          fetch(die, page, truth(place, page), 0, kPage);
        }
  }
  // A line of a die is written back and fetched again, as it may be at any time.
  void turn_over(uint64_t random) {
    Die& die = *dies_[random % dies_.size()];
    random /= dies_.size();
    const Place& place = places_[random % places_.size()];
    random /= places_.size();
    size_t page = place.page + random % ((place.end - place.first) / kPage);
    if (random / 64 % 2 && !die.dirty.empty()) page = die.dirty[random % die.dirty.size()];
    const Place& its = owner(page);
    const size_t line = random / 128 % (kPage / kLine) * kLine;
    write_back(die, page, truth(its, page), line, kLine);
    fetch(die, page, truth(its, page), line, kLine);
  }

  // A fault at `at`: true if a fiber has written a page of its die for the first time, and may go on.
  bool written(const void* at) {
    for (auto& die : dies_) {
      const uint64_t offset = reinterpret_cast<uint64_t>(at) - die->view;
      if (offset >= span_) continue;
      const Place* place = place_of(low_ + offset);
      if (!place) return false;
      const size_t page = place->page_of(low_ + offset);
      if (die->before[page]) return false;  // it is writable: the access is wrong in another way
      die->before[page] = std::make_unique<unsigned char[]>(kPage);
      memcpy(die->before[page].get(), die->own + page * kPage, kPage);
      die->dirty.push_back(page);
      protect(*die, page, PROT_READ | PROT_WRITE);
      return true;
    }
    return false;
  }

 private:
  struct Place {
    uint64_t first, end;
    size_t page;  // the first page's number among all
    size_t page_of(uint64_t at) const { return page + (at - first) / kPage; }
  };
  struct Die {
    Die(const Dies& dies, size_t pages) : seen(pages, 0), before(pages), bytes(pages * kPage), span(dies.span_) {
      const int file = memfd_create("die", 0);
      if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) abort();
      own = static_cast<unsigned char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
      void* all = mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (own == MAP_FAILED || all == MAP_FAILED) abort();
      view = reinterpret_cast<uint64_t>(all);
      for (const Place& place : dies.places_) {
        memcpy(own + place.page * kPage, reinterpret_cast<const void*>(place.first), place.end - place.first);
        void* at = reinterpret_cast<void*>(view + place.first - dies.low_);
        if (mmap(at, place.end - place.first, PROT_READ, MAP_SHARED | MAP_FIXED, file, static_cast<off_t>(place.page * kPage)) == MAP_FAILED) abort();
      }
      close(file);
    }
    ~Die() {
      munmap(own, bytes);
      munmap(reinterpret_cast<void*>(view), span);
    }
    Die(const Die&) = delete;
    Die& operator=(const Die&) = delete;

    uint64_t view, acquired = 0;  // where fibers see `low_`
    unsigned char* own;  // the same pages, always writable
    std::vector<uint64_t> seen;  // versions of the pages of memory
    std::vector<std::unique_ptr<unsigned char[]>> before;  // pages that have been written: as they were
    std::vector<size_t> dirty;  // their numbers
    size_t bytes, span;
  };

  const Place* place_of(uint64_t at) const {
    auto after = std::upper_bound(places_.begin(), places_.end(), at, [](uint64_t a, const Place& p) { return a < p.first; });
    if (after == places_.begin()) return nullptr;
    --after;
    return at < after->end ? &*after : nullptr;
  }
  const Place& owner(size_t page) const {
    for (const Place& place : places_)
      if (page >= place.page && page < place.page + (place.end - place.first) / kPage) return place;
    abort();
  }
  static unsigned char* truth(const Place& place, size_t page) {
    return reinterpret_cast<unsigned char*>(place.first + (page - place.page) * kPage);
  }
  void protect(Die& die, size_t page, int how) {
    const Place& place = owner(page);
    const uint64_t at = die.view + place.first - low_ + (page - place.page) * kPage;
    if (mprotect(reinterpret_cast<void*>(at), kPage, how)) abort();
  }

  // Bytes that the die has written go to memory; it has them unchanged from then on.
  void write_back(Die& die, size_t page, unsigned char* memory, size_t first, size_t bytes) {
    unsigned char *own = die.own + page * kPage, *before = die.before[page].get();
    if (!before || !memcmp(own + first, before + first, bytes)) return;
    for (size_t i = first; i < first + bytes; i++)
      if (own[i] != before[i]) memory[i] = before[i] = own[i];
    versions_[page] = ++clock_;
  }
  // Bytes that the die has not written are as in memory again.
  void fetch(Die& die, size_t page, const unsigned char* memory, size_t first, size_t bytes) {
    unsigned char *own = die.own + page * kPage, *before = die.before[page].get();
    if (!before) memcpy(own + first, memory + first, bytes);
    else
      for (size_t i = first; i < first + bytes; i++)
        if (own[i] == before[i]) own[i] = before[i] = memory[i];
  }
  void release(Die& die) {
    for (const size_t page : die.dirty) {
      write_back(die, page, truth(owner(page), page), 0, kPage);
      die.before[page].reset();
      protect(die, page, PROT_READ);
    }
    die.dirty.clear();
  }

  uint64_t low_, span_, clock_ = 1;
  std::vector<Place> places_;
  std::vector<uint64_t> versions_;  // of the pages of memory
  std::vector<std::unique_ptr<Die>> dies_;
};

}  // namespace host
