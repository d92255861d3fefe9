"use strict";
/**
 * Markdown as nodes of the page. A model's text reaches the page only as text nodes, and as the
 * addresses of links that `safeAddress` has passed. It is never parsed as HTML.
 *
 * The index of every character in the text is kept, so the function that paints characters can find
 * their tokens. Searches are bounded, so a hostile text does not take quadratic time.
 */
const Markdown = (() => {
  const DEEPEST = 8;  // of lists and quotes in one another
  const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
  const HEADING = /^ {0,3}(#{1,6})(?: +|$)/;
  const RULE = /^ {0,3}([-*_])/;
  const QUOTE = /^ {0,3}> ?/;
  const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: {1,4}|$)/;
  const COLUMNS = /^ {0,3}\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$|^ {0,3}\| *:?-+:? *$/;
  // Longest row of dashes below a table's head, longest stretch that one mark spans, and how often a
  // mark of one paragraph may be sought in vain.
  const ROW = 2000, SPAN = 1000, TRIES = 200;

  const SPECIAL = /[\\`*_~[!]|https?:\/\//g;
  const PUNCTUATION = /[!-/:-@[-`{-~]/;
  const WORD = /[\p{L}\p{N}_]/u;
  const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
  const LINK = /!?\[((?:[^[\]\\]|\\.){0,500})\]\( *<?([^\s()<>]{1,1000}(?:\([^\s()<>]{0,200}\)[^\s()<>]{0,500})?)>?(?: +"[^"]{0,500}")? *\)/y;
  const ADDRESS = /https?:\/\/[^\s<>"'`*\]|]{1,1000}/y;
  // Characters that make the order of letters on the screen differ from their order in the text.
  const OVERRIDES = /([\u202a-\u202e\u2066-\u2069])/;

  /** Add text unchanged, except that characters that change its direction are shown as U+ numbers. */
  function addText(parent, text) {
    for (const part of text.split(OVERRIDES)) {
      if (OVERRIDES.test(part)) {
        add(parent, "span", "control").textContent =
          "U+" + part.codePointAt(0).toString(16).toUpperCase();
      } else if (part) parent.append(part);
    }
  }

  /** Whether a line is a horizontal rule: at least three equal marks, and spaces. */
  function isRule(line) {
    const begun = RULE.exec(line);
    if (!begun) return false;
    let marks = 0;
    for (let at = begun[0].length - 1; at < line.length; at++) {
      if (line[at] === begun[1]) marks++;
      else if (line[at] !== " ") return false;
    }
    return marks >= 3;
  }

  /** The index where a heading's text ends, without spaces and the hashes that close the heading. */
  function headingEnd(text, from, to) {
    const before = (mark, end) => {
      while (end > from && text[end - 1] === mark) end--;
      return end;
    };
    const end = before(" ", to), hashes = before("#", end);
    // A space must separate the closing hashes from the text.
    return hashes === from || text[hashes - 1] === " " ? before(" ", hashes) : end;
  }

  /** An address without the punctuation that ends the sentence around it. */
  function trimAddress(address) {
    let end = address.length;
    while (end > 0 && ".,;:!?)}".includes(address[end - 1])) end--;
    return address.slice(0, end);
  }

  /** The address of a link if it leads to the web or to a mailbox, else null. */
  function safeAddress(text) {
    try {
      const url = new URL(text);
      return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
    } catch { return null; }
  }

  /** The lines of the text from an index on, as `from` and `to` without the line breaks. */
  function linesOf(text, from) {
    const lines = [];
    while (from <= text.length) {
      let to = text.indexOf("\n", from);
      if (to < 0) to = text.length;
      lines.push({ from, to });
      from = to + 1;
    }
    return lines;
  }

  /** Join lines with newlines: the joined text, and each character's index in the whole text. */
  function join(text, lines) {
    const parts = lines.map((line) => text.slice(line.from, line.to));
    const joined = parts.join("\n");
    const at = new Uint32Array(joined.length);
    let place = 0;
    for (const line of lines) {
      for (let from = line.from; from < line.to; from++) at[place++] = from;
      if (place < at.length) at[place++] = line.to;
    }
    return { text: joined, at, unclosed: new Set(), failed: new Map() };
  }

  /** The blocks of some lines, in order. */
  function* blocks(text, lines, depth) {
    const read = (i) => text.slice(lines[i].from, lines[i].to);
    const isTable = (i) => i + 1 < lines.length && lines[i + 1].to - lines[i + 1].from < ROW &&
      read(i).includes("|") && COLUMNS.test(read(i + 1)) &&
      cells(text, lines[i]).length === cells(text, lines[i + 1]).length;
    const isContainer = (line) => depth < DEEPEST && (QUOTE.test(line) || ITEM.test(line));
    const begins = (i) => {
      const line = read(i);
      return FENCE.test(line) || HEADING.test(line) || isRule(line) || isContainer(line) || isTable(i);
    };
    for (let i = 0; i < lines.length;) {
      const line = read(i), { from } = lines[i];
      let found;
      if (!line.trim()) { i++; continue; }
      if ((found = FENCE.exec(line))) {
        const end = new RegExp(`^ {0,3}${found[1][0]}{${found[1].length},} *$`);
        const first = ++i;
        while (i < lines.length && !end.test(read(i))) i++;
        yield { kind: "code", from, language: found[2].trim(), lines: lines.slice(first, i) };
        i++;
      } else if ((found = HEADING.exec(line))) {
        const begun = from + found[0].length, to = headingEnd(text, begun, lines[i].to);
        yield { kind: "heading", from, level: found[1].length, lines: [{ from: begun, to }] };
        i++;
      } else if (isRule(line)) {
        yield { kind: "rule", from };
        i++;
      } else if (depth < DEEPEST && QUOTE.test(line)) {
        const quoted = [];
        for (; i < lines.length && (found = QUOTE.exec(read(i))); i++) {
          quoted.push({ from: lines[i].from + found[0].length, to: lines[i].to });
        }
        yield { kind: "quote", from, lines: quoted };
      } else if (depth < DEEPEST && ITEM.test(line)) {
        const list = { kind: "list", from, start: parseInt(line.trim(), 10), items: [] };
        i = readList(list, lines, i, read, begins);
        yield list;
      } else if (isTable(i)) {
        const rows = [cells(text, lines[i])];
        for (i += 2; i < lines.length && read(i).includes("|"); i++) {
          rows.push(cells(text, lines[i], rows[0].length));
        }
        yield { kind: "table", from, rows };
      } else {
        const first = i++;
        while (i < lines.length && read(i).trim() && !begins(i)) i++;
        yield { kind: "paragraph", from, lines: lines.slice(first, i) };
      }
    }
  }

  /** Fill a list with each item's lines, without indentation; return the index of the line after it. */
  function readList(list, lines, i, read, begins) {
    const numbered = !Number.isNaN(list.start);
    let item = null, inset = 0, outermost = Infinity;
    for (; i < lines.length; i++) {
      const line = read(i), spaces = /^ */.exec(line)[0].length;
      const found = ITEM.exec(line), blank = !line.trim();
      const sibling = found && !isRule(line) && (item === null || spaces < Math.min(inset, outermost + 2)) &&
        /\d/.test(found[2]) === numbered;
      if (sibling) {
        inset = found[0].length;
        outermost = Math.min(outermost, spaces);
        list.items.push(item = [{ from: lines[i].from + found[0].length, to: lines[i].to }]);
      } else if (blank) {
        // After a blank line, only indented lines or another item continue the list.
        const next = i + 1 < lines.length ? read(i + 1) : "";
        const other = ITEM.exec(next);
        if (!/^ {2}/.test(next) && !(other && /\d/.test(other[2]) === numbered)) return i;
        item.push({ from: lines[i].to, to: lines[i].to });
      } else if (spaces >= Math.min(inset, outermost + 2) || (!begins(i) && read(i - 1).trim())) {
        item.push({ from: lines[i].from + Math.min(spaces, inset), to: lines[i].to });
      } else return i;
    }
    return i;
  }

  /** The cells between the bars of a table's row; if there are more than `most`, the last has the rest. */
  function cells(text, row, most = Infinity) {
    const isBar = (at) => text[at] === "|" && text[at - 1] !== "\\";
    let { from, to } = row;
    while (from < to && text[from] === " ") from++;
    while (from < to && text[to - 1] === " ") to--;
    if (from < to && isBar(from)) from++;
    if (from < to && isBar(to - 1)) to--;
    const found = [];
    for (let at = from; at < to; at++) {
      if (!isBar(at) || found.length + 1 >= most) continue;
      found.push({ from, to: at });
      from = at + 1;
    }
    found.push({ from, to });
    return found;
  }

  /** The index of the next run of exactly `count` backticks; -1 if there is none, which is remembered. */
  function closingTicks(view, count, from) {
    if (view.unclosed.has(count)) return -1;
    const run = "`".repeat(count);
    for (let at = view.text.indexOf(run, from); at >= 0; at = view.text.indexOf(run, at)) {
      let end = at + count;
      while (view.text[end] === "`") end++;
      if (end - at === count) return at;
      at = end;
    }
    view.unclosed.add(count);
    return -1;
  }

  /** The index where the mark that opens here closes; -1 if it does not close nearby. */
  function closingMark(view, mark, from, to) {
    const { text, failed } = view;
    const tried = failed.get(mark) ?? 0;
    if (tried > TRIES) return -1;
    const opened = from + mark.length;
    if (opened >= to || /\s/.test(text[opened])) return -1;
    const ofWords = mark[0] === "_";
    if (ofWords && from > 0 && WORD.test(text[from - 1])) return -1;
    const near = text.slice(opened, Math.min(to, opened + SPAN));
    for (let at = near.indexOf(mark, 1); at >= 0; at = near.indexOf(mark, at + 1)) {
      if (/\s/.test(near[at - 1]) || near[at - 1] === "\\") continue;
      const after = near[at + mark.length] ?? text[opened + at + mark.length] ?? "";
      if (after === mark[0]) continue;  // of a longer mark
      if (mark.length === 1 && near[at - 1] === mark[0]) continue;
      if (ofWords && WORD.test(after)) continue;
      return opened + at;
    }
    failed.set(mark, tried + 1);
    return -1;
  }

  /** Append a link to `parent` and return it; null if the address is not safe. */
  function addLink(parent, address) {
    const href = safeAddress(address);
    if (href === null) return null;
    const link = add(parent, "a");
    link.href = href;
    link.title = href;
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    return link;
  }

  /** Append the text of a line or a paragraph, with its links and marks. */
  function inline(parent, view, from, to, paint, depth = 0) {
    const { text } = view;
    let begun = from;
    for (let at = from; at < to;) {
      SPECIAL.lastIndex = at;
      const special = SPECIAL.exec(text);
      if (!special || special.index >= to) break;
      at = special.index;
      const before = () => begun < at && paint(parent, view, begun, at);
      let end = -1;  // the end of the mark found here
      if (text[at] === "\\" && at + 1 < to && PUNCTUATION.test(text[at + 1])) {
        before();
        begun = at + 1;
        at += 2;
        continue;
      }
      if (text[at] === "`") {
        let count = 1;
        while (text[at + count] === "`") count++;
        const close = closingTicks(view, count, at + count);
        if (close < 0 || close + count > to) { at += count; continue; }
        before();
        paint(add(parent, "code"), view, at + count, close);
        end = close + count;
      } else if (text[at] === "[" || text[at] === "!") {
        LINK.lastIndex = at;
        const link = LINK.exec(text);
        const found = link && link.index + link[0].length <= to && link[1] && safeAddress(link[2]);
        if (!found) { at++; continue; }
        before();
        const label = at + link[0].indexOf("[") + 1;
        const made = addLink(parent, link[2]);
        // Within a link no other begins.
        paint(made, view, label, label + link[1].length);
        end = at + link[0].length;
      } else if (text[at] === "h") {
        ADDRESS.lastIndex = at;
        const found = ADDRESS.exec(text);
        const address = found ? trimAddress(found[0].slice(0, to - at)) : "";
        if (!address || !safeAddress(address)) { at++; continue; }
        before();
        end = at + address.length;
        paint(addLink(parent, address), view, at, end);
      } else {
        const mark = depth < 4 && MARKS.find(([mark]) => text.startsWith(mark, at));
        const close = mark ? closingMark(view, mark[0], at, to) : -1;
        if (close < 0) {
          const run = text[at];
          while (at < to && text[at] === run) at++;
          continue;
        }
        before();
        inline(add(parent, mark[1]), view, at + mark[0].length, close, paint, depth + 1);
        end = close + mark[0].length;
      }
      at = begun = end;
    }
    if (begun < to) paint(parent, view, begun, to);
  }

  function addInline(parent, text, lines, paint) {
    const view = join(text, lines);
    parent.dir = "auto";
    inline(parent, view, 0, view.text.length, paint);
  }

  function addBlock(parent, text, block, paint, depth) {
    switch (block.kind) {
      case "rule":
        return add(parent, "hr");
      case "heading": {
        const heading = add(parent, `h${Math.min(6, block.level + 2)}`);
        addInline(heading, text, block.lines, paint);
        return heading;
      }
      case "code": {
        const figure = add(parent, "figure", "code");
        const bar = add(figure, "figcaption");
        addText(add(bar, "span"), block.language.slice(0, 40));
        const copy = add(bar, "button", "quiet copy");
        copy.type = "button";
        copy.textContent = "Copy";
        const view = join(text, block.lines);
        const code = add(add(figure, "pre"), "code");
        code.dir = "ltr";
        paint(code, view, 0, view.text.length);
        copy.dataset.text = view.text;
        return figure;
      }
      case "quote": {
        const quote = add(parent, "blockquote");
        for (const inner of blocks(text, block.lines, depth + 1)) addBlock(quote, text, inner, paint, depth + 1);
        return quote;
      }
      case "list": {
        const list = add(parent, Number.isNaN(block.start) ? "ul" : "ol");
        if (block.start > 1) list.start = block.start;
        for (const lines of block.items) {
          const item = add(list, "li");
          for (const inner of blocks(text, lines, depth + 1)) addBlock(item, text, inner, paint, depth + 1);
        }
        return list;
      }
      case "table": {
        const scroller = add(parent, "div", "table"), table = add(scroller, "table");
        block.rows.forEach((row, index) => {
          const line = add(table, "tr");
          for (const cell of row) {
            const view = join(text, [cell]);
            const [from, to] = [view.text.search(/\S|$/), view.text.trimEnd().length];
            inline(add(line, index ? "td" : "th"), view, Math.min(from, to), to, paint);
          }
        });
        return scroller;
      }
      default: {
        const paragraph = add(parent, "p");
        addInline(paragraph, text, block.lines, paint);
        return paragraph;
      }
    }
  }

  /**
   * Show a text below `parent`. Blocks before `open` stay; the blocks from `open` on are replaced.
   *
   * `paint(parent, view, from, to)` adds characters `from` to `to` of `view.text`; `view.at` holds
   * their indices in the text. Returns the next `open`, the first block that more text may change:
   * the index where the last block but one begins, and the block's node.
   */
  function render(parent, text, paint, open = { from: 0, node: null }) {
    while (open.node && open.node.nextSibling) open.node.nextSibling.remove();
    if (open.node) open.node.remove();
    else parent.replaceChildren();
    const shown = [];
    for (const block of blocks(text, linesOf(text, open.from), 0)) {
      shown.push({ from: block.from, node: addBlock(parent, text, block, paint, 0) });
    }
    return shown.at(-2) ?? shown.at(-1) ?? { from: open.from, node: null };
  }

  return { render, addText };
})();
