// A table of any length by SlickGrid: only what is seen is drawn, and rows are requested from the server by the page.

const PAGE = 100;
const AGAIN_MS = 120;

/**
 * `columns` as SlickGrid has them; `request(offset, limit)` returns `{matching, complete, rows}`; `open(row, number)` is called for
 * the row that was chosen; `changed(reply)` for each reply; `sorted(column, descending)` when a header was clicked.
 */
export class PagedTable {
  constructor(element, { columns, request, open, changed, sorted, label }) {
    this.request = request;
    this.changed = changed;
    this.pages = new Map();
    this.length = 0;
    this.run = 0;
    this.timer = 0;
    const data = { getLength: () => this.length, getItem: (number) => this.row(number) ?? {}, getItemMetadata: (number) => (this.row(number) ? null : { cssClasses: 'loading' }) };
    this.grid = new Slick.Grid(element, data, columns, {
      rowHeight: 26, enableHtmlRendering: false, enableColumnReorder: false, forceFitColumns: true, enableCellNavigation: true,
      multiColumnSort: false, nonce: document.getElementById('nonce').nonce, rowTopOffsetRenderType: 'transform',
    });
    this.element = element;
    element.setAttribute('aria-label', label);
    this.grid.onViewportChanged.subscribe(() => this.load());
    this.grid.onSort.subscribe((_, { sortCol, sortAsc }) => sorted(sortCol.field, !sortAsc));
    this.grid.onActiveCellChanged.subscribe((_, { row }) => {
      if (row !== undefined && this.row(row)) open(this.row(row), row);
    });
    this.resize = new ResizeObserver(() => { this.grid.resizeCanvas(); this.load(); });
    this.resize.observe(element);
  }

  row(number) {
    return this.pages.get(Math.floor(number / PAGE))?.[number % PAGE];
  }

  get active() {
    return this.grid.getActiveCell()?.row ?? -1;
  }

  /** Choose the row `by` rows further. */
  move(by) {
    const number = Math.max(0, Math.min(this.length - 1, this.active + by));
    if (this.length && this.row(number)) this.choose(number);
  }

  choose(number) {
    this.grid.scrollRowIntoView(number, false);
    this.grid.setActiveCell(number, 0);
    this.grid.focus();
  }

  /** The query changed: forget all rows, and go to the first. */
  async restart() {
    this.grid.resetActiveCell();
    this.pages.clear();
    this.grid.scrollRowToTop(0);
    await this.refresh();
  }

  /** Request what is seen again; other pages when they are scrolled to. */
  async refresh() {
    const run = ++this.run;
    clearTimeout(this.timer);
    const pages = this.seen();
    const replies = await Promise.all(pages.map((page) => this.request(page * PAGE, PAGE)));
    if (run !== this.run) return;
    this.pages.clear();
    pages.forEach((page, k) => this.pages.set(page, replies[k].rows));
    this.take(replies[replies.length - 1]);
    this.grid.invalidate();
    this.load();
  }

  take(reply) {
    const { matching } = reply;
    if (matching !== this.length) {
      this.length = matching;
      this.grid.updateRowCount();
      this.element.setAttribute('aria-rowcount', matching);
    }
    this.changed(reply);
    if (!reply.complete) this.timer = setTimeout(() => this.refresh(), AGAIN_MS);
  }

  seen() {
    const { top, bottom } = this.grid.getViewport();
    const first = Math.floor(Math.max(0, top) / PAGE);
    const last = Math.max(first, Math.floor(Math.max(0, Math.min(bottom, this.length - 1)) / PAGE));
    return Array.from({ length: last - first + 1 }, (_, k) => first + k);
  }

  /** Request pages that are seen and not there. */
  async load() {
    const run = this.run;
    for (const page of this.seen()) {
      if (this.pages.has(page) || page * PAGE >= this.length) continue;
      this.pages.set(page, []);
      const reply = await this.request(page * PAGE, PAGE);
      if (run !== this.run) return;
      this.pages.set(page, reply.rows);
      this.grid.invalidateRows(Array.from({ length: PAGE }, (_, k) => page * PAGE + k));
      this.grid.render();
    }
  }

  close() {
    clearTimeout(this.timer);
    this.run++;
    this.resize.disconnect();
    this.grid.destroy();
  }
}
