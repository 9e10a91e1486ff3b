/* SPDX-License-Identifier: BSD-3-Clause */
/* A button that copies a block of code, and tabs of blocks with captions that follow each other. */
"use strict";

function addCopyButton(block) {
  const button = document.createElement("button");
  button.className = "copy";
  button.type = "button";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    const text = block.querySelector("pre").textContent;
    const prompted = /^\$ /m.test(text);
    const lines = text.split("\n");
    const kept = prompted
      ? lines.filter((line) => line.startsWith("$ ")).map((line) => line.slice(2))
      : lines;
    try {
      await navigator.clipboard.writeText(kept.join("\n"));
      button.textContent = "copied";
    } catch {
      button.textContent = "not allowed";
    }
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  });
  block.append(button);
}

function addTabs(first) {
  const blocks = [first];
  for (let next = first.nextElementSibling; next?.matches(".literal-block-wrapper");) {
    blocks.push(next);
    next = next.nextElementSibling;
  }
  if (blocks.length < 2) return;
  const bar = document.createElement("div");
  bar.className = "tabs";
  bar.setAttribute("role", "tablist");
  const buttons = blocks.map((block) => {
    const caption = block.querySelector(".code-block-caption");
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("role", "tab");
    button.textContent = caption.querySelector(".caption-text").textContent;
    caption.hidden = true;
    block.setAttribute("role", "tabpanel");
    bar.append(button);
    return button;
  });
  const show = (chosen) => blocks.forEach((block, index) => {
    block.hidden = index !== chosen;
    buttons[index].setAttribute("aria-selected", index === chosen);
  });
  buttons.forEach((button, index) => button.addEventListener("click", () => show(index)));
  first.before(bar);
  show(0);
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("article div.highlight").forEach(addCopyButton);
  document.querySelectorAll("article .literal-block-wrapper").forEach((block) => {
    if (!block.previousElementSibling?.matches(".literal-block-wrapper")) addTabs(block);
  });
});
