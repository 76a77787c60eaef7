"use strict";
/* Images of the next message: dropped onto the page or pasted. The browser keeps them with the conversation, so large ones are
   made smaller; they are sent as data URLs. */
const largest = 1280;  // pixels of the longer side; projectors read fewer
const sent = ["image/png", "image/jpeg"];
let attached = [];     // data URLs
const begun = document.getElementById("prompt").placeholder;

const offerImages = (are) => { at("prompt").placeholder = begun + (are ? " Images can be dropped or pasted." : ""); };

const contentOf = ({prompt, images}) => images && images.length
  ? [...images.map((url) => ({type: "image_url", image_url: {url}})), {type: "text", text: prompt}] : prompt;

function showImages(parent, images) {
  for (const url of images || []) {
    const image = make(parent, "img", "image");
    image.src = url;
    image.alt = "attached image";
  }
}

function setAttached(images) {
  attached = images || [];
  at("attached").replaceChildren();
  at("attached").hidden = !attached.length;
  attached.forEach((url, i) => {
    const button = make(at("attached"), "button", "attached");
    showImages(button, [url]);
    button.setAttribute("aria-label", "Remove image " + (i + 1));
    button.addEventListener("click", () => setAttached(attached.filter((_, j) => j !== i)));
  });
}

function takeAttached() {
  const taken = attached;
  setAttached([]);
  return taken;
}

const read = (file) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(file);
});

async function dataUrl(file) {
  const bitmap = await createImageBitmap(file), scale = Math.min(1, largest / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && sent.includes(file.type)) return read(file);
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(scale * bitmap.width));
  canvas.height = Math.max(1, Math.round(scale * bitmap.height));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

async function attach(files) {
  for (const file of [...files].filter((each) => each.type.startsWith("image/"))) {
    try { setAttached([...attached, await dataUrl(file)]); } catch {
      at("said").textContent = file.name + " is not an image that this browser can read";
    }
  }
  at("prompt").focus();
}

addEventListener("dragover", (dragged) => { if (dragged.dataTransfer.types.includes("Files")) dragged.preventDefault(); });
addEventListener("drop", (dropped) => {
  if (!dropped.dataTransfer.files.length) return;
  dropped.preventDefault();
  attach(dropped.dataTransfer.files);
});
addEventListener("paste", (pasted) => { if (pasted.clipboardData.files.length) attach(pasted.clipboardData.files); });
