"use strict";
/** An answer on the page: its text while it arrives, its counts, and a chart of its target calls. */
const Answer = (() => {
  const BARS = 60, TALLEST = 6;  // calls in the chart; tokens of its highest bar
  const SVG = "http://www.w3.org/2000/svg";

  class Answer {
    /** `view` has the settings of the page: `written` shows the text as the target wrote it, not as Markdown. */
    constructor(parent, title, view) {
      this.view = view;
      this.root = add(parent, "section", "answer");
      const bar = add(this.root, "header");
      add(bar, "h2", "", title);
      this.chart = document.createElementNS(SVG, "svg");
      this.chart.setAttribute("viewBox", `0 0 ${BARS * 3} ${TALLEST * 3}`);
      this.chart.setAttribute("role", "img");
      bar.append(this.chart);
      const copy = add(bar, "button", "quiet copy", "Copy");
      copy.type = "button";
      this.copied = () => { copy.dataset.text = this.shown; };
      this.counts = add(this.root, "div", "counts");
      this.box = add(this.root, "div", "text");
      this.text = "";      // the answer's text in the conversation that later requests send
      this.shown = "";     // the text of all tokens
      this.tokens = [];    // for each token: [end of its text in `shown`, its target call, its proposer]
      this.gains = [];     // number of tokens of each target call; prefill is call 0
      this.after = 0;
      this.first = this.last = null;
      this.open = undefined;
      this.waiting = 0;
    }

    /** Add the tokens of a `draft_trace`, and the text that they add to the conversation. */
    take(trace, text) {
      const now = performance.now();
      for (const { text, call, origin } of trace) {
        if (this.first === null) this.first = now;
        else if (now > this.first) this.after += 1;
        this.shown += text;
        this.tokens.push([this.shown.length, call, origin]);
        this.gains[call] = (this.gains[call] ?? 0) + 1;
      }
      this.last = now;
      this.text += text;
      this.schedule();
    }

    /** The data from which `restore` shows this answer again later. */
    get record() { return { text: this.text, shown: this.shown, tokens: this.tokens, speed: this.speed }; }

    restore(record) {
      Object.assign(this, { text: record.text, shown: record.shown, tokens: record.tokens, restored: record.speed });
      for (const [, call] of this.tokens) this.gains[call] = (this.gains[call] ?? 0) + 1;
      this.finish();
    }

    get speed() {
      return this.restored ?? (this.after ? (1000 * this.after) / (this.last - this.first) : 0);
    }

    /** Show new text in the next frame; a text that takes long to show is shown less often. */
    schedule() {
      if (this.waiting) return;
      this.waiting = setTimeout(() => requestAnimationFrame(() => {
        if (!this.waiting) return;
        const began = performance.now(), follow = this.view.atEnd();
        this.waiting = 0;
        this.show();
        this.pause = 3 * (performance.now() - began);
        if (follow) this.view.toEnd();
      }), this.pause ?? 0);
    }

    /** Show the whole text again, with the current settings. */
    finish() {
      clearTimeout(this.waiting);
      this.waiting = 0;
      this.open = undefined;
      this.show();
    }

    show() {
      const paint = (...stretch) => this.paint(...stretch);
      if (this.view.written()) {
        this.box.replaceChildren();
        const plain = add(this.box, "p");
        plain.dir = "auto";
        paint(plain, { text: this.shown, at: null }, 0, this.shown.length);
      } else {
        this.open = Markdown.render(this.box, this.shown, paint, this.open);
      }
      this.copied();
      this.count();
      this.draw();
    }

    /** Add characters `from` to `to` of a view, coloured by who proposed their tokens. */
    paint(parent, view, from, to) {
      if (!this.view.colours()) return Markdown.addText(parent, view.text.slice(from, to));
      const place = (index) => (view.at ? view.at[index] : index);
      for (let token = this.tokenAt(place(from)), end; from < to; from = end, token++) {
        for (end = from; end < to && place(end) < this.tokens[token][0];) end++;
        // The next character may lie beyond what the view leaves out.
        if (end === from) continue;
        const [, call, origin] = this.tokens[token];
        const who = origin === null ? "own" : origin === "lookup" ? "lookup" : "drafter";
        const shown = add(parent, "span", `token ${who} ${call % 2 ? "odd" : "even"}`);
        shown.title = call ? `target call ${call}, by ${origin ?? "the target"}` : "by the target, which read the prompt";
        shown.dataset.token = token;
        Markdown.addText(shown, view.text.slice(from, end));
      }
    }

    /** The index of the token that holds the character at index `place` of the text. */
    tokenAt(place) {
      let low = 0, high = this.tokens.length - 1;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (this.tokens[middle][0] > place) high = middle;
        else low = middle + 1;
      }
      return low;
    }

    count() {
      const gained = this.tokens.length - 1;  // the first token is from prefill
      const calls = this.tokens.length ? this.tokens[this.tokens.length - 1][1] : 0;
      this.perCall = calls ? gained / calls : 1;
      this.counts.textContent = `${this.tokens.length} tokens, ${this.speed.toFixed(1)} tokens/s, ` +
        `${this.perCall.toFixed(2)} tokens per target call, ${Math.max(0, gained - calls)} calls saved`;
    }

    /** Draw a bar for each of the last target calls; its height is the number of tokens gained. */
    draw() {
      const last = this.gains.slice(1).slice(-BARS);
      const bars = last.map((gained, index) => {
        const bar = document.createElementNS(SVG, "rect");
        const height = 3 * Math.min(TALLEST, gained ?? 0);
        Object.entries({ x: 3 * index, y: 3 * TALLEST - height, width: 2, height })
          .forEach(([name, value]) => bar.setAttribute(name, value));
        if (gained > 1) bar.setAttribute("class", "gain");
        return bar;
      });
      this.chart.replaceChildren(...bars);
      this.chart.setAttribute("aria-label", `Tokens of the last ${last.length} target calls`);
    }
  }
  return Answer;
})();
