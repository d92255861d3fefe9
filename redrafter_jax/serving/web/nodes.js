"use strict";
/** Append a new element to `parent`, with a class and a text if they are given; return it. */
const add = (parent, tag, name = "", text = "") => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text) made.textContent = text;
  parent.append(made);
  return made;
};
