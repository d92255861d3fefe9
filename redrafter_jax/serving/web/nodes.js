"use strict";
/** A new element below `parent`, with a class and a text if they are given. */
const add = (parent, tag, name = "", text = "") => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text) made.textContent = text;
  parent.append(made);
  return made;
};
